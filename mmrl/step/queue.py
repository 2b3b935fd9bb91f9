"""The steps between a run's rows and its learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config.sections import TrainerConfig
from mmrl.data.prompts import PromptSource
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.prefetch import PromptPrefetcher
from mmrl.step.source import Left, Source
from mmrl.system.clock import Clock

REACHED = "rows_reached"
"""The key of a state that only a run has whose rows were not all measured at the start."""


class StepQueue:
    """Gathers steps and hands them out. Its depth is 0: a step is gathered when it is taken, with the newest weights.

    A checkpoint keeps its place in the rows, and the groups that skipped steps have left for the next one.

    Args:
        train: The rows; their place is their beginning.
    """

    def __init__(self, config: TrainerConfig, source: Source, train: PromptSource) -> None:
        self._config, self._source, self._train = config, source, train
        train.restore(())
        self._prompts: PromptPrefetcher[Any] = PromptPrefetcher(train, train.order(config.seed), source.make)

    @property
    def consumed_prompts(self) -> int:
        """Prompts taken from the data order so far: the position of the next one."""
        return self._prompts.position

    @property
    def left_out(self) -> dict[str, float]:
        """Rows that were left out so far, as metrics of a step."""
        return {name: float(self._train.left_out[name]) for name in self._source.left_out}

    def take(self, step: int, clock: Clock) -> SampledStep:
        """The step's groups.

        Raises:
            MMRLError: As ``Source.gather``.
        """
        return self._source.gather(step, self._prompts.draw, clock)

    def prepare(self, step: int) -> None:
        """Begin to make the prompts of the step after this one, if there is one."""
        if step < self._config.steps:
            self._prompts.prepare(self._config.prompts_per_step - len(self._source.left.carried))

    def wait(self) -> None:
        """Wait until all is prepared: no other thread reads rows then."""
        self._prompts.wait()

    def stop(self) -> None:
        """Prepare no more."""
        self._prompts.stop()

    def left(self) -> dict[str, Any]:
        """Records of what is left for the next step, as JSON can hold it."""
        return self._source.left.state()

    def reached(self) -> dict[str, Sequence[Any]]:
        """Facts of the rows that were reached, if not all were measured at the start."""
        rows = self._train.state()
        return {} if rows is None else {REACHED: rows}

    def restore(self, state: Mapping[str, Any], media: Path) -> None:
        """Take over ``consumed_prompts``, ``left`` and ``reached`` of a trainer's state.

        Args:
            media: The folder of the groups' images.
        """
        self._prompts.go_to(int(state["consumed_prompts"]))
        self._train.restore(state.get(REACHED, ()))
        self._source.go_back(Left.of(state, media))
