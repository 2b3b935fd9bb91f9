"""The points of a sweep with their checked configs, and the sweep's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.commands.sweep.grammar import RUN_DIR, SEED, Words
from mmrl.config.load import LoadedConfig, load_config, plain_values
from mmrl.config.sections import Config, TrainerConfig
from mmrl.config.yaml_tree import Located, join_errors, read_tree, to_flow, to_lines, tree_of
from mmrl.errors import ConfigError, MMRLError
from mmrl.plugin_host.registry import options_class
from mmrl.runs.directory import check_place
from mmrl.runs.files import replace_file, writing
from mmrl.runs.resumption import changed_values
from mmrl.runs.sweeps import SCHEMA, SWEEP, Sweep, is_sweep, load_sweep, told, told_value
from mmrl.system.redaction import Redactor, remember_secrets

LOGS, GIVEN = "logs", "given"
_OWN = {SWEEP, LOGS, GIVEN}
"""Names that a sweep's folder may hold before it has a sweep."""
_SUFFIX = "-sweep"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,39}")
_UNFIT = re.compile(r"[^A-Za-z0-9.+]+")
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A point before it is run.

    Attributes:
        values: The value of each axis.
        loaded: The config that points with the same values share, their seeds and folders left out.
        run: Its run's folder.
    """

    name: str
    values: Mapping[str, Any]
    seed: int
    loaded: LoadedConfig
    run: Path

    @property
    def config(self) -> dict[str, Any]:
        """The point's own config, in plain values."""
        plain = plain_values(self.loaded.config)
        return plain | {"trainer": plain["trainer"] | {"seed": self.seed, "run_dir": str(self.run)}}

    @property
    def origins(self) -> dict[str, str]:
        """The place where each value of the config was written."""
        return {**self.loaded.origins, SEED: "--seeds", RUN_DIR: "mmrl sweep"}


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep that may be run.

    Attributes:
        folder: SWEEP.
        config: The config as it was written, without axes, seed and folder, as YAML.
    """

    folder: Path
    config: str
    axes: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    points: Sequence[PlannedPoint]
    warnings: Sequence[str] = ()

    @property
    def logs(self) -> Path:
        """The folder of the points' consoles."""
        return self.folder / LOGS

    def log(self, point: PlannedPoint) -> Path:
        """The file of a point's console."""
        return self.logs / f"{point.name}.log"

    def record(self) -> dict[str, Any]:
        """The content of sweep.json."""
        points = [{"folder": each.name, "values": dict(each.values), "seed": each.seed} for each in self.points]
        record = {"schema": SCHEMA, "config": self.config, "axes": self.axes, "seeds": self.seeds, "points": points}
        plain: dict[str, Any] = Redactor().plain(record)
        return plain

    def check_folder(self) -> None:
        """Check that the sweep can be in its folder; makes nothing.

        Raises:
            ConfigError: The folder holds a run, other files, or a sweep that this one does not go on with.
            DataError: Its sweep.json is damaged.
            ResourceError: It cannot be written.
        """
        where, folder = "--folder", self.folder
        if is_sweep(folder):
            _check_same(load_sweep(folder), self)
            return
        found = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
        others = sorted(name for name in found - _OWN if not name.startswith("."))
        if others:
            raise ConfigError(
                f"{folder} holds other files, and no sweep: {', '.join(others[:3])}",
                where=where,
                possible="a new folder, an empty one, or that of a sweep to go on with",
                remedy="name another --folder",
            )
        if not found:
            check_place(folder)

    def make_folder(self) -> None:
        """Make the folder, unless it is there.

        Raises:
            ResourceError: It cannot be made.
        """
        with writing(self.folder):
            self.logs.mkdir(parents=True, exist_ok=True)

    def write(self) -> None:
        """Write sweep.json into the folder."""
        replace_file(self.folder / SWEEP, json.dumps(self.record(), indent=1) + "\n")


def plan_sweep(paths: Sequence[Path | Located], words: Words, folder: Path | None = None) -> SweepPlan:
    """The points of a sweep, each with a config that was checked.

    Args:
        folder: SWEEP; by default the config's ``trainer.run_dir`` with ``-sweep`` after it.

    Raises:
        MMRLError: All errors in the points' configs, each told once; or points that no file could tell apart.
    """
    tree, _ = read_tree(paths, words.overrides)
    seeds = words.seeds or [_seed(tree)]
    folder = (folder or sweep_folder(tree)).expanduser()
    configs, errors = list[tuple[dict[str, Any], LoadedConfig]](), dict[str, MMRLError]()
    for overrides, values in words.combinations():
        try:
            loaded = load_config(paths, overrides, options_class=options_class)
        except MMRLError as error:
            for part in error.parts or (error,):
                errors.setdefault(part.what, part)
            continue
        remember_secrets(loaded.config.model_dump(mode="json"))
        configs.append((values, loaded))
    if errors:
        raise join_errors(list(errors.values()))
    _check_apart(configs)
    names = _short_names(words.axes)
    points = [
        PlannedPoint(name, values, seed, loaded, folder / name)
        for seed in seeds
        for values, loaded in configs
        for name in [point_name(names, values, seed)]
    ]
    base = tree
    for key in (SEED, RUN_DIR, *words.axes):
        base = base.without(key.split("."))
    text = "\n".join(to_lines(Redactor().plain(base.plain()), lambda key: "")) + "\n"
    warnings = dict.fromkeys(warning for _, loaded in configs for warning in loaded.warnings)
    plan = SweepPlan(folder, text, words.axes, list(seeds), points, list(warnings))
    plan.check_folder()
    return plan


def _check_apart(configs: Sequence[tuple[Mapping[str, Any], LoadedConfig]]) -> None:
    """Check that combinations of values differ in their configs, and in what sweep.json says of them.

    Raises:
        ConfigError: Names two that do not.
    """
    redactor = Redactor()
    by_config, by_values = dict[str, Mapping[str, Any]](), dict[str, Mapping[str, Any]]()
    for values, loaded in configs:
        config = json.dumps(plain_values(loaded.config), sort_keys=True, default=str)
        if (same := by_config.setdefault(config, values)) is not values:
            what = f"the runs with {redactor(told(same))} and {redactor(told(values))} have the same config"
            raise ConfigError(what, where="mmrl sweep", remedy="keep one of them, or the word that replaces both")
        shown = json.dumps(redactor.plain(values), sort_keys=True)
        if by_values.setdefault(shown, values) is not values:
            what = f"two runs have {redactor(told(values))}: they differ in a secret alone, which no file may hold"
            raise ConfigError(what, where="mmrl sweep", remedy="run a sweep for each secret, each with its --folder")


def sweep_folder(tree: Located) -> Path:
    """The folder of a config's sweeps: that of its run with ``-sweep`` after it."""
    path = RUN_DIR.split(".")
    run_dir = tree.nearest(path).plain() if tree.holds(path) else None
    return Path(f"{run_dir or TrainerConfig.model_fields['run_dir'].default}{_SUFFIX}").expanduser()


def point_name(names: Mapping[str, str], values: Mapping[str, Any], seed: int) -> str:
    """The name of a point's folder, such as ``lr-0.001_seed-0``: the same whatever other points there are.

    Args:
        names: The short name of each axis.
    """
    whole = "_".join([*(f"{names[key]}-{_slug(value)}" for key, value in values.items()), f"seed-{seed}"])
    return whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]}-{_hash(whole)}"


def _short_names(axes: Mapping[str, Any]) -> dict[str, str]:
    """The last part of each key; the whole key where two axes share their last part."""
    last = [key.rpartition(".")[2] for key in axes]
    return {key: _UNFIT.sub("_", name if last.count(name) == 1 else key) for key, name in zip(axes, last, strict=True)}


def _slug(value: Any) -> str:
    """A value in a file's name; with a hash of it where it had to be changed for that. No secret is a part of it."""
    text = Redactor()(told_value(value))
    if _PLAIN.fullmatch(text) or re.fullmatch(r"-?[0-9.e+-]+", text):
        return text
    plain = _UNFIT.sub("-", text).strip("-.")[:30]
    return f"{plain or 'value'}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _seed(tree: Located) -> int:
    path = SEED.split(".")
    value = tree.nearest(path).plain() if tree.holds(path) else None
    default = Config.model_fields["trainer"].get_default(call_default_factory=True).seed
    return value if type(value) is int else int(default)


def _check_same(before: Sweep, now: SweepPlan) -> None:
    """Check that a sweep goes on with one in its folder: the same, or with further values and seeds.

    Raises:
        ConfigError: Names what differs.
    """
    file = str(before.path / SWEEP)
    then, new = tree_of(before.config, file).plain(), tree_of(now.config, "").plain()
    lines = [str(change) for change in changed_values(then, new)]
    if set(before.axes) != set(now.axes):
        lines.append(f"axes: {', '.join(before.axes) or 'none'} -> {', '.join(now.axes) or 'none'}")
    axes = Redactor().plain(now.axes)
    pairs = [(key, values, axes.get(key)) for key, values in before.axes.items()]
    for key, values, others in [*pairs, ("seeds", before.seeds, now.seeds)]:
        if missing := [value for value in values if others is not None and value not in others]:
            lines.append(f"{key} had {', '.join(map(to_flow, missing))} too")
    if lines:
        raise ConfigError(
            "the folder holds another sweep, which this one does not go on with:\n"
            + "\n".join(f"    {line}" for line in lines),
            where=file,
            possible="the same command, or one with further values of the same axes or further seeds",
            remedy="undo the change, or name another --folder",
        )
