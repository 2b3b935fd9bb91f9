"""A run, live or finished, read from its folder: metrics, rollouts, events, checkpoints. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.config.yaml_tree import read_tree
from mmrl.errors import ConfigError, DataError
from mmrl.rollout.records import (
    RecordedRollout,
    evaluation_names,
    read_rollouts,
    recorded_evaluations,
    recorded_steps,
)
from mmrl.rollout.records.paging import GroupPages
from mmrl.runs.checkpoints import Checkpoint, Checkpoints
from mmrl.runs.files import is_locked, read_records, whole_size
from mmrl.runs.history import finite_or_nan, metrics_of, read_metrics
from mmrl.runs.pace import Pace
from mmrl.runs.standing import Standing, State, standing


class Metrics(Mapping[str, float]):
    """The last value of each metric; ``curve`` has those before it.

    Attributes:
        steps: Every metric of each step that was finished; 0 is before the first.
    """

    def __init__(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        self.steps = steps

    def __getitem__(self, name: str) -> float:
        return list(self.curve(name).values())[-1]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for values in self.steps.values() for name in values))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self))

    def frame(self) -> Any:
        """A table of pandas, which must be installed: a row for each step, a column for each metric."""
        import pandas as pd

        return pd.DataFrame.from_dict(self.steps, orient="index").rename_axis("step")

    def curve(self, name: str) -> dict[int, float]:
        """The metric's value at each step that has it.

        Raises:
            KeyError: No step has it.
        """
        found = {step: values[name] for step, values in self.steps.items() if name in values}
        if not found:
            raise KeyError(f"no step has {name!r}; there are: {', '.join(self) or 'none yet'}")
        return found

    def best(self, name: str, *, is_min: bool = False) -> float:
        """The best value that the metric has had; NaN only if it never was a number.

        Raises:
            KeyError: No step has it.
        """
        values = list(self.curve(name).values())
        return (min if is_min else max)([value for value in values if value == value] or values)


class Run:
    """A run's folder. Everything is read when it is asked for, so that a live run shows its latest state.

    Attributes:
        path: RUN.
        stopped: Why ``mmrl.train`` returned before the last step; empty if it did not.
    """

    def __init__(self, path: str | Path, stopped: str = "") -> None:
        self.path, self.stopped = Path(path).expanduser().absolute(), stopped

    @property
    def metrics(self) -> Metrics:
        """The metrics: ``run.metrics["eval/accuracy"]`` is the last value, ``run.metrics.curve("eval/accuracy")`` all.

        Raises:
            DataError: metrics.jsonl is damaged.
        """
        return Metrics(read_metrics(self.path))

    @property
    def rollout_steps(self) -> list[int]:
        """The steps whose rollouts were recorded."""
        return list(recorded_steps(self.path))

    def rollouts(self, step: int | None = None) -> Iterator[RecordedRollout]:
        """The rollouts of a step, or of all steps, read one by one; each has ``text``, ``rewards`` and ``images``.

        Raises:
            DataError: There are none, or a file is damaged.
        """
        if step is None:
            return read_rollouts(self.path)
        if step not in (known := recorded_steps(self.path)):
            possible = ", ".join(map(str, known)) or "none yet"
            raise DataError(f"there are no rollouts of step {step}", where=str(self.path), possible=possible)
        return read_rollouts(known[step])

    @property
    def evaluation_names(self) -> list[str]:
        """The evaluation sets that were recorded; the name of the only one may be empty."""
        return evaluation_names(self.path)

    @property
    def evaluation_steps(self) -> list[int]:
        """The steps whose evaluations were recorded, of any set."""
        return sorted({step for name in self.evaluation_names for step in self.evaluation_steps_of(name)})

    def evaluation_steps_of(self, name: str) -> list[int]:
        """The steps whose evaluations of a set were recorded; the name of the only set may be empty."""
        return list(recorded_evaluations(self.path, name))

    def evaluations(self, step: int, name: str | None = None, *, blank: bool = False) -> Iterator[RecordedRollout]:
        """The rollouts of the evaluation after a step, as ``rollouts``; 0 is before the first.

        Args:
            name: The evaluation set; by default the only one.
            blank: True for those of the prompts whose images were blank (``trainer.blank_every``).

        Raises:
            DataError: There are none, there are several sets and none is named, or the file is damaged.
        """
        return read_rollouts(self._evaluation(step, name, blank=blank))

    def evaluation_groups(self, step: int, name: str | None = None, *, blank: bool = False) -> GroupPages:
        """The groups of the evaluation after a step, as ``groups``; arguments and errors as of ``evaluations``."""
        return GroupPages(self._evaluation(step, name, blank=blank))

    def _evaluation(self, step: int, name: str | None, *, blank: bool) -> Path:
        names = self.evaluation_names or [""]
        if (name is None and len(names) > 1) or (name is not None and name not in names):
            what = "there are several evaluation sets" if name is None else f"there is no evaluation set {name!r}"
            possible = ", ".join(each or "''" for each in names) if names != [""] else "one set, without a name"
            remedy = "name one: evaluations(step, NAME)" if names != [""] else "leave the name out: evaluations(step)"
            raise DataError(what, where=str(self.path), possible=possible, remedy=remedy)
        name = names[0] if name is None else name
        if step not in (known := recorded_evaluations(self.path, name, blank=blank)):
            possible = ", ".join(map(str, known)) or "none yet"
            what = f"there is no evaluation{f' of {name}' if name else ''}{' with blank images' * blank}"
            raise DataError(f"{what} after step {step}", where=str(self.path), possible=possible)
        return known[step]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl: ``time``, ``kind`` and what belongs to it."""
        return list(read_records(self.path / "events.jsonl"))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are kept, by ``step``; each has a ``path``."""
        return Checkpoints(self.path / "checkpoints").all()

    @property
    def policy_path(self) -> Path:
        """The newest checkpoint's model: a Hugging Face folder, or an adapter of one.

        Raises:
            DataError: There is no checkpoint.
        """
        if found := self.checkpoints:
            return found[-1].model
        raise DataError("the run has no checkpoint yet", where=str(self.path), remedy="wait for trainer.save_every")

    def groups(self, step: int) -> GroupPages:
        """The groups of a step: an index of chosen columns, and one group's records at a time.

        Raises:
            DataError: The step was not recorded.
        """
        if step not in (known := recorded_steps(self.path)):
            possible = ", ".join(map(str, known)) or "none yet"
            raise DataError(f"there is no record of step {step}", where=str(self.path), possible=possible)
        return GroupPages(known[step])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, as plain values.

        Raises:
            ConfigError: There is none yet, or it cannot be read.
        """
        tree, _ = read_tree([self.path / "config.yaml"])
        config: dict[str, Any] = tree.plain()
        return config

    @property
    def is_live(self) -> bool:
        """True if a process is at work on it."""
        return is_locked(self.path)

    @property
    def standing(self) -> Standing:
        """The run's state, and the reason why it stopped or failed.

        Raises:
            DataError: attempts.jsonl or events.jsonl is damaged.
        """
        return standing(self.path, is_live=self.is_live)

    @property
    def state(self) -> State:
        """``waiting``, ``running``, ``done``, ``stopped`` or ``failed``, as ``standing`` says."""
        return self.standing.state

    @property
    def seconds_left(self) -> float | None:
        """The seconds from its last line in metrics.jsonl to the end of its last step, at the pace of its last steps.

        None if it is not at work, or no step was timed yet. ``trainer.stop_when`` may end it earlier.

        Raises:
            DataError: metrics.jsonl is damaged.
        """
        if not self.is_live:
            return None
        return Pace.of(self.path, self.config).seconds_left(max(self.metrics.steps, default=0))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        metrics = self.metrics
        parts = [str(self.path), f"step {max(metrics.steps, default=0)}"]
        parts += [f"{name} {metrics[name]:.3g}" for name in ("eval/accuracy", "reward/mean") if name in metrics][:1]
        parts += ["live"] if self.is_live else [f"stopped {self.stopped}"] if self.stopped else []
        return f"Run({', '.join(parts)})"


class NewMetrics:
    """The lines that are appended to a run's metrics.jsonl from now on; also of one that takes its place."""

    def __init__(self, run: Path) -> None:
        self._file = run / "metrics.jsonl"
        self._place, self._inode = 0, 0
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            self._inode, self._place = os.fstat(file.fileno()).st_ino, whole_size(file)

    def read(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and metrics of each new line, once."""
        try:
            with self._file.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._place:
                    self._place, self._inode = 0, status.st_ino
                file.seek(self._place)
                lines = file.readlines()
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._place += len(line)
            record = json.loads(line)
            yield int(record["step"]), finite_or_nan(metrics_of(record))


def load_run(path: str | Path) -> Run:
    """The run in a folder, whether it is live or done.

    Raises:
        ConfigError: The folder holds no run.
    """
    run = Run(path)
    if not any((run.path / name).exists() for name in ("attempts.jsonl", "metrics.jsonl", "config.yaml")):
        raise ConfigError("there is no run", where=str(run.path), remedy="name the folder that trainer.run_dir names")
    return run
