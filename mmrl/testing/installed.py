"""What can be said of an installed plugin without a config: it loads, and keeps the rules of its kind."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mmrl import registry
from mmrl.errors import ConfigError, MMRLError
from mmrl.registry import PluginInfo
from mmrl.testing.algorithms import check_algorithm
from mmrl.testing.datasets import check_dataset
from mmrl.testing.rewards import check_reward


class Verdict(NamedTuple):
    """What a check found.

    Attributes:
        status: ``ok``: loaded, and its contract checks passed with default options; ``loaded``: no more than that can
            be checked; ``bad``: it cannot be used.
        note: Why it is not ``ok``, in a line or more.
    """

    status: Literal["ok", "loaded", "bad"]
    note: str = ""


def examine(info: PluginInfo) -> Verdict:
    """Load a plugin and run the contract checks of its kind on it."""
    name = f"{info.distribution}:{info.name}"
    try:
        options = registry.options_class(info.kind, name)
        required = [key for key, field in options.model_fields.items() if field.is_required()]
        if required:
            return Verdict("loaded", f"not checked, as it has no default for {', '.join(required)}")
        if info.kind == "algorithm":
            check_algorithm(name)
        elif info.kind == "reward":
            check_reward(name)
        elif info.kind == "dataset":
            check_dataset(name)
        else:
            return Verdict("loaded", f"there are no checks for {info.kind}s")
    except ConfigError as error:
        return Verdict("loaded", f"not checked, as its default options do not go together: {error.what}")
    except MMRLError as error:
        return Verdict("bad", str(error))
    except Exception as error:  # one that answers nonsense must not hide the others
        return Verdict("bad", f"{info}: {type(error).__name__}: {error}")
    return Verdict("ok")
