"""The sources of a step's groups: one strategy for each ``Algorithm.source``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.errors import MMRLError, NumericsError, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector
from mmrl.step.views import ViewMaker
from mmrl.system.clock import Clock
from mmrl.types import GIVEN, CreditedGroup, EncodedPrompt, Prompt, Rollout, RolloutGroup, Sample, ScoredGroup

Draw = Callable[[int], Sequence[tuple[int, Any]]]
"""The next so many prompts as ``Source.make`` made them, each with the epoch that it is drawn in."""


class Source(ABC):
    """The source of a step's groups: a way to make prompts ready, and one to gather a step.

    Args:
        event: Called with a kind and fields for each thing that a run is told.

    Attributes:
        samples: True if each step samples the policy, and rewards score it; else rows have the completions.
        texts: The noun for the texts that a step learns from.
        carried: Groups of skipped steps, to be used first in the next one. The weights have not moved since then.
    """

    samples: ClassVar[bool]
    texts: ClassVar[str]

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        encoder: PromptEncoder,
        collector: Collector,
        event: Callable[..., None],
    ) -> None:
        self._config, self._algorithm, self._encoder = config, algorithm, encoder
        self._collector, self._event = collector, event
        self._views = ViewMaker(config, algorithm, encoder)
        self.carried: list[ScoredGroup] = []

    @abstractmethod
    def make(self, prompt: Prompt) -> Any:
        """The object that is made of a prompt when it is drawn."""

    @abstractmethod
    def gather(self, step: int, draw: Draw, clock: Clock) -> SampledStep:
        """The step's groups.

        Raises:
            MMRLError: A reward or the algorithm fails, and nothing was sampled.
        """


class Given(Source):
    """The dataset's own completions: each demonstration is a group of one, without a reward."""

    samples, texts = False, "demonstrations"

    def make(self, prompt: Prompt) -> Sample:
        return self._encoder.demonstrate(self._encoder.encode(prompt), all_turns=self._algorithm.needs().all_turns)

    def gather(self, step: int, draw: Draw, clock: Clock) -> SampledStep:
        with clock.phase("prompts"):
            drawn = draw(self._config.trainer.prompts_per_step)
            samples = [(epoch, self._seen(sample, epoch, step)) for epoch, sample in drawn]
        groups = [demonstrated(sample, epoch, place) for place, (epoch, sample) in enumerate(samples)]
        return SampledStep(step, GIVEN, groups, self._views.metrics(step), learned=groups)

    def _seen(self, sample: Sample, epoch: int, step: int) -> Sample:
        """The demonstration with the views of its prompt."""
        prompt = self._views(replace(sample.prompt, epoch=epoch), step)
        return replace(sample, prompt=prompt) if prompt.views else sample


class Rollouts(Source):
    """Completions of the policy itself, scored by rewards."""

    samples, texts = True, "completions"

    def make(self, prompt: Prompt) -> EncodedPrompt:
        return self._encoder.encode(prompt)

    def gather(self, step: int, draw: Draw, clock: Clock) -> SampledStep:
        count = self._config.trainer.prompts_per_step
        carried, self.carried = self.carried, []

        def seen(number: int) -> Sequence[tuple[int, EncodedPrompt]]:
            return [(epoch, self._views(replace(prompt, epoch=epoch), step)) for epoch, prompt in draw(number)]

        try:
            found = self._collector.training_groups(step, self._algorithm, seen, count - len(carried), clock)
        except MMRLError as error:  # such as too many failures of rewards
            if not (lost := self._collector.generated):
                raise
            unscored = [_unscored(group, (0, place)) for place, group in enumerate(lost)]
            return SampledStep(step, lost[0].rollouts[0].weight_version, unscored, fault=error)
        found = replace(found, learned=[*carried, *found.learned], stats={**found.stats, **self._views.metrics(step)})
        if len(found.learned) < count:
            found = self._starved(found)
        if found.fault is None and not any(group.valid.any() for group in found.groups):
            self._event("unscored", message=f"no rollout of step {step} could be scored")
        return found

    def _starved(self, found: SampledStep) -> SampledStep:
        """The step whose algorithm rejected too many groups, as its ``Refill.on_starvation`` says."""
        refill, wanted = self._algorithm.needs().refill, self._config.trainer.prompts_per_step
        assert refill is not None, "only what may be rejected can be missing"
        step, sampled, rate = found.step, len(found.groups), len(found.kept) / len(found.groups)
        what = f"step {step} has {len(found.learned)} of {wanted} groups: {rate:.1%} of the {sampled} sampled were kept"
        self._event("starved", message=what, step=step, acceptance_rate=rate, action=refill.on_starvation)
        if refill.on_starvation == "stop":
            error = NumericsError(
                f"the algorithm rejects too many groups: {what}",
                where=f"algorithm: {self._config.algorithm.name}, after {found.rounds} rounds of sampling",
                remedy="use prompts that the policy gets right sometimes and not always, raise sampler.group_size, "
                "or let the algorithm sample more rounds or train on smaller batches",
            )
            return replace(found, learned=(), fault=error)
        if refill.on_starvation == "skip":
            self.carried = [replace(group, place=None) for group in found.learned]
            return replace(found, learned=())
        return found


def demonstrated(sample: Sample, epoch: int = 0, place: int = 0) -> ScoredGroup:
    """A demonstration as a group; the row's other columns, which no reward reads, stay in the dataset.

    Args:
        place: Its place in the step.
    """
    row = sample.prompt.prompt
    prompt = replace(sample.prompt, prompt=replace(row, demonstration=None, columns={}), epoch=epoch)
    rollout = Rollout(prompt, sample.segments, 0, row.demonstration or "", "stop", GIVEN)
    return ScoredGroup(RolloutGroup(prompt, (rollout,)), np.zeros(1), np.ones(1, np.bool_), {}, place=(0, place))


SOURCES: Mapping[str, type[Source]] = {"rollouts": Rollouts, "demonstrations": Given}
"""By ``Algorithm.source``."""


def state_of(algorithm: Algorithm) -> dict[str, Any]:
    """A copy of the algorithm's state, as the next step may change it."""
    with plugin_errors(algorithm, "state"):
        state: dict[str, Any] = json.loads(json.dumps(dict(algorithm.state())))
    return state


def step_groups(found: SampledStep, trained: Sequence[CreditedGroup]) -> list[CreditedGroup]:
    """The groups that were trained on, and then the others of the step."""
    return [*trained, *(not_trained_on(group) for group in found.groups if not (trained and group.kept))]


def not_trained_on(group: ScoredGroup) -> CreditedGroup:
    """The record of a group that no step has learned from."""
    zeros = [np.zeros(len(rollout.token_ids)) for rollout in group.rollouts]
    return CreditedGroup(group, zeros, [np.zeros(0, np.float32)] * len(zeros))


def _unscored(group: RolloutGroup, place: tuple[int, int]) -> ScoredGroup:
    count = len(group.rollouts)
    return ScoredGroup(group, np.zeros(count), np.zeros(count, np.bool_), {}, kept=False, place=place)
