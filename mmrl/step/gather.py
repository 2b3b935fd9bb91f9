"""The sources of a step's groups: one strategy for each ``Algorithm.source``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.errors import MMRLError, NumericsError, SamplersRestarted, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.rollout.batch import SampledStep
from mmrl.step.given import Comparisons, Given
from mmrl.step.source import Draw, Left, Source
from mmrl.system.clock import Clock
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, RolloutGroup, ScoredGroup


class Rollouts(Source):
    """Completions of the policy itself, scored by rewards."""

    samples, texts = True, "completions"

    def make(self, prompt: Prompt) -> EncodedPrompt:
        return self._encoder.encode(prompt)

    def gather(self, step: int, draw: Draw, clock: Clock, version: int | None = None) -> SampledStep:
        count = self._config.trainer.prompts_per_step
        carried, self.left = self.left.carried, Left()

        def seen(number: int) -> Sequence[tuple[int, EncodedPrompt]]:
            return [(epoch, self._views(replace(prompt, epoch=epoch), step)) for epoch, prompt in draw(number)]

        try:
            wanted = count - len(carried)
            found = self._collector.training_groups(step, self._algorithm, seen, wanted, clock, version)
        except SamplersRestarted:
            raise
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
            self.left = Left([replace(group, place=None) for group in found.learned])
            return replace(found, learned=())
        return found


SOURCES: Mapping[str, type[Source]] = {"rollouts": Rollouts, "demonstrations": Given, "comparisons": Comparisons}
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
