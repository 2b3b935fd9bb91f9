"""A sweep, read from its folder: one run for each combination of values and each seed. Imports no torch.

SWEEP/sweep.json   the config as it was written, the axes, the seeds, and the points with their folders
SWEEP/NAME/        the run of a point
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.yaml_tree import to_flow
from mmrl.errors import ConfigError, DataError
from mmrl.runs.reader import Metrics, Run
from mmrl.runs.standing import State

SWEEP = "sweep.json"
SCHEMA = 1
_FOLDER = re.compile(r"[\w+-][\w.+-]{0,250}", re.ASCII)
"""Names of points' folders; none leads out of the sweep's."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes:
        run: Its run, whose folder need not be there yet.
        values: The value of each axis, by dotted key.
        seed: Its ``trainer.seed``.
    """

    run: Run
    values: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.run.path.name

    @property
    def state(self) -> State:
        return self.run.state

    @property
    def metrics(self) -> Metrics:
        """The run's metrics: the last value of each, and its curve; empty if it has not begun."""
        return self.run.metrics

    def best(self, metric: str, *, is_min: bool = False) -> float:
        """The best value that the metric has had.

        Raises:
            KeyError: No step has it.
        """
        return (min if is_min else max)(self.metrics.curve(metric).values())


@dataclass(frozen=True, slots=True)
class Setting:
    """The points of a sweep that differ in nothing but the seed; ``str`` gives the values."""

    values: Mapping[str, Any]
    points: Sequence[Point]

    def __str__(self) -> str:
        return told(self.values)


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """A sweep's folder. States and metrics are read when they are asked for, so that a live sweep shows its latest.

    Attributes:
        path: SWEEP.
        config: The config as it was written, without the axes, as YAML.
        axes: The values of each dotted key.
    """

    path: Path
    config: str
    axes: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    points: Sequence[Point]

    @property
    def settings(self) -> list[Setting]:
        """The points without their seeds, in the order of the axes' values."""
        found: dict[str, Setting] = {}
        for point in self.points:
            key = json.dumps(point.values, sort_keys=True)
            before = found[key].points if key in found else ()
            found[key] = Setting(point.values, (*before, point))
        return list(found.values())

    def __repr__(self) -> str:
        return f"Sweep({self.path}, {len(self.settings)} settings x {len(self.seeds)} seeds)"


def told(values: Mapping[str, Any]) -> str:
    """Values of axes for a person: ``learner.lr=1e-05 sampler.group_size=4``."""
    return " ".join(f"{key}={told_value(value)}" for key, value in values.items())


def told_value(value: Any) -> str:
    """A value for a person: a number as Python writes it, all else as YAML on one line."""
    return repr(value) if isinstance(value, float) else to_flow(value)


def is_sweep(path: str | Path) -> bool:
    """True if the folder is a sweep's."""
    return (Path(path).expanduser() / SWEEP).is_file()


def read_sweep(path: str | Path) -> Sweep:
    """The sweep in a folder, whether it is live or done.

    Raises:
        ConfigError: The folder holds no sweep.
        DataError: Its sweep.json is damaged, or of a later version.
    """
    folder = Path(path).expanduser().absolute()
    file = folder / SWEEP
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        remedy = "name the folder of a sweep, which holds sweep.json"
        raise ConfigError("there is no sweep", where=str(folder), remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise DataError(f"the sweep's record cannot be read: {error}", where=str(file)) from error
    if isinstance(record, dict) and isinstance(record.get("schema"), int) and record["schema"] > SCHEMA:
        remedy = "read it with the version of mmrl that wrote it, or a later one"
        raise DataError(f"the sweep has schema {record['schema']}, of a later version", where=str(file), remedy=remedy)
    try:
        points = [
            Point(Run(folder / _checked(each["folder"])), dict(each["values"]), int(each["seed"]))
            for each in record["points"]
        ]
        axes = {str(key): list(values) for key, values in record["axes"].items()}
        return Sweep(folder, str(record["config"]), axes, [int(seed) for seed in record["seeds"]], points)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the sweep's record is not as a sweep writes it: {type(error).__name__}: {error}"
        raise DataError(what, where=str(file)) from error


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a point's folder")
    return name
