"""A run's surroundings, as the loop sees them: the place where it writes, and the parts that may end or watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmrl.engine_api import Learner
from mmrl.errors import SamplersRestarted
from mmrl.ops.alarms import Looked
from mmrl.step.evaluate import EvaluationRecorder
from mmrl.step.updates import UpdateRecorder
from mmrl.system.profiling import Profiler
from mmrl.system.signals import Interruption
from mmrl.system.watchdog import Watchdog
from mmrl.types import CreditedGroup


class Recorder(UpdateRecorder, EvaluationRecorder, Protocol):
    """The recorder of a run's numbers: its folder, the trackers and the console."""

    def rollouts(self, step: int, groups: Sequence[CreditedGroup], state: Mapping[str, Any]) -> None:
        """Note all groups of a step, and the algorithm's state before it; they may be written later.

        Raises:
            ResourceError: Rollouts of an earlier step cannot be written.
        """
        ...

    def wait_for_rollouts(self) -> None:
        """Wait until the rollouts of all steps and evaluations are on disk.

        Raises:
            ResourceError: They cannot be written.
        """
        ...

    def look(self, step: int, values: Mapping[str, float]) -> Looked:
        """Show a finished step to the monitors, before it is logged; tells their alarms."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def save(self, learner: Learner, step: int, values: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Write a checkpoint.

        Raises:
            ResourceError: The disk is full or cannot be written; nothing has changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run's surroundings: the place where it writes, and the parts that may end or watch it.

    Attributes:
        recorder: Takes its numbers.
        interruption: Handles signals.
        watchdog: Watches every step, evaluation and checkpoint.
        profiler: Records some steps.
        may_restart: Called when ranks that sample alone were lost and started again; False ends the run.
    """

    recorder: Recorder
    interruption: Interruption
    watchdog: Watchdog
    profiler: Profiler
    may_restart: Callable[[SamplersRestarted], bool] = lambda error: False
