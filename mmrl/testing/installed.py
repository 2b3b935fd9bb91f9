"""Checks installed plugins without a config: each loads, and keeps the rules of its kind.

Plugins are tried in a child process. One that hangs, exits or prints does not affect the others.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, cast

from mmrl.errors import ConfigError, MMRLError, PluginError
from mmrl.interfaces import DatasetLoader
from mmrl.plugin_host import registry
from mmrl.plugin_host.installed import PluginInfo
from mmrl.system.worker_process import Line, WorkerProcess, WorkerProcessEnded
from mmrl.testing.algorithms import check_algorithm
from mmrl.testing.datasets import check_dataset
from mmrl.testing.environments import check_environment
from mmrl.testing.monitors import check_monitor
from mmrl.testing.rewards import check_reward
from mmrl.testing.rules import Untried

TIMEOUT_S = 60.0
"""Seconds for one plugin, with its imports."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Batches are so small that a second thread only waits."""


class Verdict(NamedTuple):
    """The outcome of a check.

    Attributes:
        status: ``ok``: loaded, and its contract checks passed with default options; ``loaded``: nothing more can be
            checked; ``bad``: it cannot be used.
        note: Why it is not ``ok``, in a line or more.
    """

    status: Literal["ok", "loaded", "bad"]
    note: str = ""


def examine(infos: Sequence[PluginInfo]) -> Iterator[Verdict]:
    """The verdict on each plugin, in order, as soon as it is known."""
    child: WorkerProcess | None = None
    try:
        for info in infos:
            if child is None or child.has_ended:
                if child:
                    child.stop()
                child = WorkerProcess(__name__, os.environ | _ONE_THREAD)
            yield _ask(child, info)
    finally:
        if child:
            child.stop()


def _ask(child: WorkerProcess, info: PluginInfo) -> Verdict:
    remedy = "look for a wait, or a loop without end, in its module, its constructor or its hooks"
    try:
        reply = child.ask(pickle.dumps(info), TIMEOUT_S)
        if reply is not None:
            return Verdict(**reply)
        what = f"is not done with its checks within {TIMEOUT_S:g} s"
    except WorkerProcessEnded as end:
        what, remedy = f"ended the process ({end.how})", "raise an exception instead, or repair the crash"
    return Verdict("bad", str(PluginError(f"{info} {what}", where=info.target, remedy=remedy)))


def serve() -> None:
    """Run the child process."""
    line = Line()
    for info in line:
        line.send(_examine(info)._asdict())


def _examine(info: PluginInfo) -> Verdict:
    """Load a plugin and run the contract checks of its kind on it."""
    name = info.name if info.distribution == "file" else f"{info.distribution}:{info.name}"
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
            if (facts := cast(type[DatasetLoader], registry.resolve("dataset", name)).facts) is not None:
                return Verdict("loaded", f"not checked, as it would fetch {facts.origin}")
            check_dataset(name)
        elif info.kind == "environment":
            check_environment(name)
        elif info.kind == "monitor":
            check_monitor(name)
        else:
            return Verdict("loaded", f"there are no checks for {info.kind}s")
    except ConfigError as error:
        return Verdict("loaded", f"not checked, as its default options do not go together: {error.what}")
    except Untried as error:
        return Verdict("loaded", f"not checked, as it raised on made-up data: {error.where}")
    except MMRLError as error:
        return Verdict("bad", str(error))
    except BaseException as error:  # one that answers nonsense, or exits, must not hide the others
        return Verdict("bad", f"{info}: {type(error).__name__}: {error}")
    return Verdict("ok")
