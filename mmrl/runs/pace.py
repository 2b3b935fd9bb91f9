"""A run's pace: the seconds of its finished steps, and the time that is left at that pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.ops.time_left import RECENT, Timed, Work, seconds_left, step_seconds, times_due
from mmrl.runs.files import read_records_back

_WARM_UP = 2
"""First steps of an attempt that are slower than others; of evaluations and checkpoints it is one."""
_READ_BACK = 4096
"""Lines of metrics.jsonl that are looked at when a run goes on: evaluations may be hundreds of steps apart."""


class Pace:
    """The seconds of a run's last steps, evaluations and checkpoints.

    Args:
        eval_every: Steps between evaluations; 0 if there are none.
        save_every: Steps between checkpoints; 0 if there are none between the first and the last.
    """

    def __init__(self, steps: int, eval_every: int, save_every: int) -> None:
        self._last, self._eval_every, self._save_every = steps, eval_every, save_every
        self._before: Mapping[str, Any] | None = None
        kept = RECENT + _WARM_UP
        self._steps, self._evaluations = deque[Timed](maxlen=kept), deque[Timed](maxlen=kept)
        self._checkpoints = deque[Timed](maxlen=kept)

    @classmethod
    def of(cls, run: Path, config: Mapping[str, Any]) -> Pace:
        """The pace that a run's metrics.jsonl tells of.

        Args:
            config: The run's, as plain values.

        Raises:
            DataError: The file is damaged.
        """
        trainer = config["trainer"]
        evaluates = bool(config["data"].get("eval"))
        pace = cls(trainer["steps"], trainer["eval_every"] if evaluates else 0, trainer["save_every"])
        for line in reversed([*islice(read_records_back(run / "metrics.jsonl"), _READ_BACK)]):
            pace.note(line)
        return pace

    def note(self, line: Mapping[str, Any]) -> None:
        """Take a finished step in, by its line in metrics.jsonl."""
        seconds = step_seconds(line, self._before), line.get("perf/eval_s"), line.get("perf/save_s")
        for timed, each in zip((self._steps, self._evaluations, self._checkpoints), seconds, strict=True):
            if each is not None:
                timed.append((line.get("attempt", 0), each))
        self._before = {key: line[key] for key in ("attempt", "time") if key in line}

    def seconds_left(self, step: int) -> float | None:
        """The seconds from the end of a step to that of the last one; None if no step was timed yet."""
        last, eval_every = self._last, self._eval_every
        return seconds_left(
            Work(self._steps, last - step, _WARM_UP),
            Work(self._evaluations, times_due(eval_every, step, last) if eval_every else 0),
            Work(self._checkpoints, times_due(self._save_every, step, last)),
        )
