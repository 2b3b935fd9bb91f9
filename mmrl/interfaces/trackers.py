"""The interface of trackers: plugins that show a run somewhere else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.interfaces.plugins import Plugin
from mmrl.types import FloatArray, ImageRef, Message


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout as a tracker shows it to people.

    Attributes:
        messages: The whole conversation; each ``<image>`` stands for the next image.
        images: Images of the prompt and of observations.
        answer: The reference answer as text; empty if there is none.
        reward: The weighted sum of its rewards; NaN if it could not be scored.
    """

    messages: tuple[Message, ...]
    images: tuple[ImageRef, ...]
    answer: str
    reward: float


class Tracker(Plugin):
    """Sends metrics somewhere. Called from a thread of its own: it can neither stop nor slow a run.

    A run that goes on makes a new object: ``restore`` if there is a ``state``, then ``start``; steps after the
    checkpoint that it goes on from are logged again. Output of its service belongs on the console only with ``mmrl
    train --verbose``, which sets ``MMRL_VERBOSE=1``.
    """

    @abstractmethod
    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Open the tracker for one run; ``config`` is the resolved one, as plain values."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""

    def alarm(self, step: int, monitor: str, message: str) -> None:
        """Show an alarm of a monitor, as text."""
        return

    def evaluation(self, step: int, rollouts: Sequence[ShownRollout], histograms: Mapping[str, FloatArray]) -> None:
        """Show an evaluation, before its step is logged; not called with ``trainer.tracked_rollouts: 0``.

        Args:
            rollouts: One of each of the first prompts of each evaluation set, the same in every evaluation.
            histograms: Values of every completion, by name: ``eval/reward`` and ``eval/length`` of the evaluation
                (``eval/NAME/reward`` of a set that has a name), ``rollouts/reward`` and ``rollouts/length`` of the step
                before it, (n,) each.
        """
        return

    @abstractmethod
    def finish(self) -> None:
        """Flush and close."""

    def state(self) -> Mapping[str, Any]:
        """State as JSON, such as the run's id, asked for after ``start``; each checkpoint keeps it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over an earlier ``state``, before ``start``, to go on in the same place."""
        return
