"""The config of a call: a file or a mapping, with the functions, classes and rows that were given as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.api.capture import GIVEN, reference
from mmrl.api.datasets import entry, named_entries, named_sets
from mmrl.api.origins import Origins
from mmrl.config.load import LoadedConfig, load_config
from mmrl.config.plugin_specs import Kind
from mmrl.config.sections import TrainerConfig
from mmrl.config.yaml_tree import Located, read_tree
from mmrl.interfaces import Environment, Reward
from mmrl.plugin_host.registry import options_class
from mmrl.runs.directory import check_place

ConfigLike = str | Path | Mapping[str, Any]
"""A YAML file, or the same as a mapping."""
RewardLike = str | Mapping[str, Any] | Callable[..., Any] | type[Reward]
EnvironmentLike = str | Mapping[str, Any] | type[Environment] | Callable[..., Any] | Sequence[Callable[..., Any]]
NOTHING: Mapping[str, Any] = {}


def loaded_with(
    config: ConfigLike,
    overrides: Mapping[str, Any],
    rewards: Any = (),
    dataset: Any = None,
    algorithm: Any = None,
    environment: Any = None,
    eval_dataset: Any = None,
    folder: Path | None = None,
    origins: Origins | None = None,
) -> LoadedConfig:
    """The checked config of a run; given plugins and rows become files in a folder, unless there are errors.

    Args:
        folder: By default in the run's.
        origins: Gets the places where given plugins were written.
    """
    base = Located.of(config, "config") if isinstance(config, Mapping) else Path(config).expanduser()
    over = Located.of_dotted(overrides, "overrides")
    tree, _ = read_tree([base, over])
    if folder is None:
        run_dir = _value(tree, "trainer", "run_dir") or TrainerConfig.model_fields["run_dir"].default
        folder = Path(str(run_dir)).expanduser().absolute() / GIVEN
        check_place(folder.parent)
    origins = Origins() if origins is None else origins
    named = partial(reference, folder=folder, origins=origins)
    with _kept_if_good(folder):
        values: dict[str, Any] = {}
        if rewards:
            single = isinstance(rewards, str | Mapping) or callable(rewards)
            listed = [rewards] if single else rewards
            entries = [each if isinstance(each, Mapping) else _reward(each) for each in listed]
            values["rewards"] = [{**each, "name": named("reward", each.get("name"))} for each in entries]
        if algorithm is not None:
            values["algorithm"] = {"name": named("algorithm", algorithm)}
        if environment is not None:
            values["environment"] = _environment(environment, named)
        data = {}
        if dataset is not None:
            data["train"] = entry(dataset, "dataset", _section(tree, "train"), folder, "train")
        if sets := named_sets(eval_dataset):
            data["eval"] = named_entries(sets, "eval_dataset", folder, "test")
        elif eval_dataset is not None:
            data["eval"] = entry(eval_dataset, "eval_dataset", _section(tree, "eval"), folder, "test")
        values |= {"data": data} if data else {}
        names = "arguments of the call"
        cleared = [Located.of({"data": {"eval": {}}}, names)] if sets else []
        layers = [base, *cleared, Located.of(values, names), over]
        with origins.telling():
            return load_config(layers, options_class=options_class)


def _reward(given: Any) -> Mapping[str, Any]:
    """The config's entry of a reward; a partial function has its values as options."""
    if isinstance(given, partial) and not given.args:
        return {"name": given.func, **given.keywords}
    return {"name": given}


def _environment(given: Any, named: Callable[[Kind, Any], str]) -> dict[str, Any]:
    """The config's entry of an environment that was given as an argument."""
    if isinstance(given, Mapping):
        name = {"name": named("environment", given["name"])} if "name" in given else {}
        return {**given, **name}
    if isinstance(given, str | type):
        return {"name": named("environment", given)}
    functions = given if isinstance(given, Sequence) else [given]
    return {"tools": [named("environment", function) for function in functions]}


def _section(tree: Located, key: str) -> Mapping[str, Any]:
    """The section of ``data`` under a key; empty if it is not there, or is no mapping."""
    found = _value(tree, "data", key)
    return found if isinstance(found, Mapping) else {}


def _value(tree: Located, *path: str) -> Any:
    """The plain value there; None if there is none."""
    return tree.nearest(path).plain() if tree.holds(path) else None


@contextmanager
def _kept_if_good(folder: Path) -> Iterator[None]:
    """Remove from the folder what the block has written if it fails."""
    before, had_run = set(folder.rglob("*")), folder.parent.exists()
    try:
        yield
    except BaseException:
        for path in sorted(set(folder.rglob("*")) - before, reverse=True):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        for path in (folder, *(() if had_run else (folder.parent,))):
            with suppress(OSError):
                path.rmdir()
        raise
