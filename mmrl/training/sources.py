"""The sources of a step's samples: one strategy for each ``Algorithm.source``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.errors import MMRLError, NumericsError, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.ops import metrics
from mmrl.rollout.batch import batch_of, rollouts_of
from mmrl.rollout.collector import Collector, SampledBatch, sampled_metrics
from mmrl.rollout.records import group_records, read_groups
from mmrl.system.clock import Clock
from mmrl.training.update_log import UpdateRecorder
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, Rollout, RolloutGroup, Sample, ScoredGroup

GIVEN = -1
"""The version of the weights of what nobody sampled."""
REACHED = "rows_reached"
"""The key of a trainer's state that only a run has whose rows were not all measured at the start."""

Draw = Callable[[int], Sequence[tuple[int, Any]]]
"""The next so many prompts as ``Source.make`` made them, each with the epoch that it is drawn in."""


class StepRecorder(UpdateRecorder, Protocol):
    """The recorder of a step's rollouts."""

    def rollouts(self, step: int, groups: Sequence[CreditedGroup], state: Mapping[str, Any]) -> None:
        """Note all groups that a step sampled, and the algorithm's state before it; they may be written later.

        Raises:
            ResourceError: Rollouts of an earlier step cannot be written.
        """
        ...


class Source(ABC):
    """The source of a step's samples.

    Attributes:
        samples: True if each step samples the policy, and rewards score it; else rows have demonstrations.
    """

    samples: ClassVar[bool]

    def __init__(
        self, config: Config, algorithm: Algorithm, encoder: PromptEncoder, collector: Collector, recorder: StepRecorder
    ) -> None:
        self._config, self._algorithm, self._encoder = config, algorithm, encoder
        self._collector, self._recorder = collector, recorder

    @abstractmethod
    def make(self, prompt: Prompt) -> Any:
        """The object that is made of a prompt when it is drawn."""

    @abstractmethod
    def collect(self, step: int, draw: Draw, clock: Clock) -> tuple[SampledBatch, Sequence[ScoredGroup]]:
        """The step's samples, and the groups to learn from; none if the step has to be left out.

        Raises:
            MMRLError: A reward or the algorithm fails, or the algorithm rejects too many groups and says to stop.
        """

    @property
    def num_carried(self) -> int:
        """The number of groups of the next step that are there already."""
        return 0

    def metrics(self, found: SampledBatch) -> dict[str, float]:
        """Metrics of all that was sampled."""
        return metrics.length_metrics(found.batch.masks, found.batch.truncated)

    def state(self) -> list[dict[str, Any]]:
        """Records of the groups that are carried over to the next step, as JSON can hold them."""
        return []

    def restore(self, state: Sequence[Mapping[str, Any]], media: Path) -> None:
        """Take over the answer of ``state``.

        Args:
            media: The folder of images.
        """
        return


class Demonstrations(Source):
    """The dataset's own completions."""

    samples = False

    def make(self, prompt: Prompt) -> Sample:
        return self._encoder.demonstrate(self._encoder.encode(prompt), all_turns=self._algorithm.needs().all_turns)

    def collect(self, step: int, draw: Draw, clock: Clock) -> tuple[SampledBatch, Sequence[ScoredGroup]]:
        with clock.phase("prompts"):
            drawn = draw(self._config.trainer.prompts_per_step)
        groups = [demonstrated(replace(s, prompt=replace(s.prompt, epoch=epoch))) for epoch, s in drawn]
        return SampledBatch((), rollouts_of(groups), batch_of(groups, {})), groups


class Rollouts(Source):
    """Completions of the policy itself, scored by rewards.

    Attributes:
        carried: Groups that the algorithm kept in steps that were skipped, to be used first in the next one. The
            weights have not moved since they were sampled.
    """

    samples = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.carried: list[ScoredGroup] = []

    def make(self, prompt: Prompt) -> EncodedPrompt:
        return self._encoder.encode(prompt)

    @property
    def num_carried(self) -> int:
        return len(self.carried)

    def state(self) -> list[dict[str, Any]]:
        return group_records(self.carried)

    def restore(self, state: Sequence[Mapping[str, Any]], media: Path) -> None:
        self.carried = read_groups(state, media)

    def metrics(self, found: SampledBatch) -> dict[str, float]:
        refills = self._algorithm.needs().refill is not None
        return sampled_metrics(found, self._collector.accuracy_of, refills=refills)

    def collect(self, step: int, draw: Draw, clock: Clock) -> tuple[SampledBatch, Sequence[ScoredGroup]]:
        count = self._config.trainer.prompts_per_step
        carried, self.carried = self.carried, []
        try:
            found = self._collector.training_groups(self._algorithm, draw, count - len(carried), clock)
        except MMRLError:  # such as too many failures of rewards
            if lost := self._collector.generated:
                unscored = [not_trained_on(_unscored(group, (0, place))) for place, group in enumerate(lost)]
                self._recorder.rollouts(step, unscored, state_of(self._algorithm))
            raise
        groups = [*carried, *found.kept]
        if len(groups) < count:
            groups = self._starve(step, groups, found)
        if not found.batch.valid.any():
            self._recorder.event("unscored", message=f"no rollout of step {step} could be scored")
        return found, groups

    def _starve(self, step: int, groups: list[ScoredGroup], found: SampledBatch) -> list[ScoredGroup]:
        """The groups to train on where the algorithm rejected too many, as its ``Refill.on_starvation`` says."""
        refill, wanted = self._algorithm.needs().refill, self._config.trainer.prompts_per_step
        assert refill is not None, "only what may be rejected can be missing"
        sampled = len(found.groups)
        rate = len(found.kept) / sampled
        what = f"step {step} has {len(groups)} of {wanted} groups: {rate:.1%} of the {sampled} sampled were kept"
        self._recorder.event("starved", message=what, step=step, acceptance_rate=rate, action=refill.on_starvation)
        if refill.on_starvation == "stop":
            self._recorder.rollouts(step, step_groups(found, ()), state_of(self._algorithm))
            raise NumericsError(
                f"the algorithm rejects too many groups: {what}",
                where=f"algorithm: {self._config.algorithm.name}, after {found.rounds} rounds of sampling",
                remedy="use prompts that the policy gets right sometimes and not always, raise sampler.group_size, "
                "or let the algorithm sample more rounds or train on smaller batches",
            )
        if refill.on_starvation == "skip":
            self.carried = [replace(group, place=None) for group in groups]
            return []
        return groups


SOURCES: Mapping[str, type[Source]] = {"rollouts": Rollouts, "demonstrations": Demonstrations}
"""By ``Algorithm.source``."""


def demonstrated(sample: Sample) -> ScoredGroup:
    """A demonstration as a group of its own, without rewards."""
    text = sample.prompt.prompt.demonstration or ""
    rollout = Rollout(sample.prompt, sample.segments, 0, text, "stop", GIVEN)
    return ScoredGroup(RolloutGroup(sample.prompt, (rollout,)), np.zeros(1), np.ones(1, bool), {})


def state_of(algorithm: Algorithm) -> dict[str, Any]:
    """A copy of the algorithm's state, as the next step may change it."""
    with plugin_errors(algorithm, "state"):
        state: dict[str, Any] = json.loads(json.dumps(dict(algorithm.state())))
    return state


def step_groups(found: SampledBatch, trained: Sequence[CreditedGroup]) -> list[CreditedGroup]:
    """The groups that were trained on, and then the others that were sampled in the step."""
    return [*trained, *(not_trained_on(group) for group in found.groups if not (trained and group.kept))]


def not_trained_on(group: ScoredGroup) -> CreditedGroup:
    """The record of a group that no step has learned from."""
    zeros = [np.zeros(len(rollout.token_ids)) for rollout in group.rollouts]
    return CreditedGroup(group, zeros, [np.zeros(0, np.float32)] * len(zeros))


def _unscored(group: RolloutGroup, place: tuple[int, int]) -> ScoredGroup:
    count = len(group.rollouts)
    return ScoredGroup(group, np.zeros(count), np.zeros(count, np.bool_), {}, kept=False, place=place)
