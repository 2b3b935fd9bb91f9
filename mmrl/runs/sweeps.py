"""A sweep, read from its folder: one run for each combination of values and each seed. Imports no torch.

SWEEP/sweep.json   the config as it was written, the axes, the seeds, and the points with their folders
SWEEP/NAME/        the run of a point
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.yaml_tree import to_flow, tree_of
from mmrl.errors import ConfigError, DataError, first_line
from mmrl.runs.history import MET
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
        return self.metrics.best(metric, is_min=is_min)


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

    def table(self, metric: str = "", *, is_min: bool = False) -> Table:
        """The settings with the mean and the deviation of a metric over their seeds, best first.

        A run whose files are damaged counts as failed, and hides no other.

        Args:
            metric: By default the config's ``trainer.best_metric``, else the accuracy of the last evaluation, or what
                else tells how the runs went.
            is_min: True if less is better; ``trainer.best_is`` and losses say so by themselves.

        Raises:
            ConfigError: No point has the metric.
        """
        read = {point.name: _read(point) for point in self.points}
        found = {name: metrics for name, (_, metrics) in read.items()}
        known = sorted({name for metrics in found.values() for name in metrics})
        if metric and metric not in known:
            raise ConfigError(
                f"no point has the metric {metric}", where=str(self.path), possible=", ".join(known) or "none yet"
            )
        best, order = _ranked_by(self.config)
        metric = metric or usual_metric(self.config, found.values())
        is_best = metric == best
        is_min = is_min or (is_best and order == "min") or metric.startswith("loss/")
        rows = []
        for setting in self.settings:
            states = {point.seed: read[point.name][0] for point in setting.points}
            metrics = {point.seed: found[point.name] for point in setting.points}
            done = [seed for seed, state in states.items() if state == "done" and metric in metrics[seed]]
            values = {
                seed: metrics[seed].best(metric, is_min=is_min) if is_best else metrics[seed][metric] for seed in done
            }
            rows.append(Row(setting, states, values))
        rows.sort(key=lambda row: _rank(row.mean, is_min=is_min))
        return Table(metric, is_min, is_best, rows)

    def __repr__(self) -> str:
        return f"Sweep({self.path}, {len(self.settings)} settings x {len(self.seeds)} seeds)"


@dataclass(frozen=True, slots=True)
class Row:
    """A setting in the table of a sweep.

    Attributes:
        states: The state of each seed's run.
        values: The metric of each seed whose run is done.
    """

    setting: Setting
    states: Mapping[int, State]
    values: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None if no run is done."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, of a sample; None of fewer than two."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """The settings of a sweep by a metric, best first; ``repr`` is for a person.

    Attributes:
        is_min: True if less is better.
        is_best: True if a run's value is the best that it has had, as it is of ``trainer.best_metric``; else the last.
    """

    metric: str
    is_min: bool
    is_best: bool
    rows: Sequence[Row]

    def lines(self) -> list[str]:
        """The table for a person."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row.setting.values))
        cells = [[*keys, "done", "mean", "deviation", "least", "most", ""], *(_cells(row, keys) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        which, order = "best" if self.is_best else "last", "least" if self.is_min else "most"
        title = f"{self.metric}: the {which} value of each run, over the seeds that are done; the {order} first"
        table = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
        return [title, "", *(line.rstrip() for line in table)]

    def data(self) -> dict[str, Any]:
        """The table in plain values."""
        rows = [
            {
                "values": dict(row.setting.values),
                "mean": row.mean,
                "deviation": row.deviation,
                "of_seeds": {str(seed): value for seed, value in row.values.items()},
                "points": {
                    str(point.seed): {"run": str(point.run.path), "state": row.states[point.seed]}
                    for point in row.setting.points
                },
            }
            for row in self.rows
        ]
        return {"metric": self.metric, "is_min": self.is_min, "is_best": self.is_best, "settings": rows}

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _rank(mean: float | None, *, is_min: bool) -> tuple[bool, float]:
    """The key by which settings are sorted: the best mean first; those last that have none, or no number."""
    if mean is None or math.isnan(mean):
        return True, 0.0
    return False, mean if is_min else -mean


def _read(point: Point) -> tuple[State, Metrics]:
    """The state and the metrics of a point's run, each read once."""
    try:
        return point.state, point.metrics
    except DataError:  # the run itself tells it when it goes on
        return "failed", Metrics({})


def usual_metric(config: str, metrics: Iterable[Mapping[str, float]]) -> str:
    """The metric by which the runs of a config are compared: ``trainer.best_metric``, else an accuracy if there is any.

    Args:
        config: As YAML.
        metrics: Those of the runs.
    """
    known = set().union(*metrics)
    accuracies = sorted(name for name in known if name.startswith("eval/") and name.endswith("/accuracy"))
    first, *others = MET
    names = [_ranked_by(config)[0], first, *accuracies, *others]
    return next((name for name in names if name and name in known), first)


def _ranked_by(config: str) -> tuple[str | None, str]:
    """``trainer.best_metric`` and ``trainer.best_is`` of a config."""
    tree = tree_of(config, SWEEP)

    def text(name: str) -> str | None:
        path = ("trainer", name)
        found = tree.nearest(path).plain() if tree.holds(path) else None
        return found if isinstance(found, str) else None

    return text("best_metric"), text("best_is") or "max"


def _cells(row: Row, keys: Sequence[str]) -> list[str]:
    values = [told_value(row.setting.values[key]) if key in row.setting.values else "" for key in keys]
    numbers = [row.mean, row.deviation, min(row.values.values(), default=None), max(row.values.values(), default=None)]
    states = Counter(row.states.values())
    others = ", ".join(f"{count} {state}" for state, count in states.items() if state != "done")
    done = f"{states['done']}/{len(row.states)}"
    return [*values, done, *("-" if number is None else f"{number:.4g}" for number in numbers), others]


def told(values: Mapping[str, Any]) -> str:
    """Values of axes for a person: ``learner.lr=1e-05 sampler.group_size=4``."""
    return " ".join(f"{key}={told_value(value)}" for key, value in values.items())


def told_value(value: Any) -> str:
    """A value for a person: a number as Python writes it, all else as YAML on one line."""
    return repr(value) if isinstance(value, float) else to_flow(value)


def is_sweep(path: str | Path) -> bool:
    """True if the folder is a sweep's."""
    return (Path(path).expanduser() / SWEEP).is_file()


def load_sweep(path: str | Path) -> Sweep:
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
    except (OSError, ValueError, RecursionError) as error:
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
        config = str(record["config"])
        tree_of(config, str(file))
        return Sweep(folder, config, axes, [int(seed) for seed in record["seeds"]], points)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ConfigError) as error:
        what = f"the sweep's record is not as a sweep writes it: {type(error).__name__}: {first_line(error)}"
        raise DataError(what, where=str(file)) from error


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a point's folder")
    return name
