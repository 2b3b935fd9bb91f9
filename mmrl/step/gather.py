"""The sources of a step's groups: one strategy for each ``Algorithm.source``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.errors import ConfigError, DataError, MMRLError, NumericsError, SamplersRestarted, plugin_errors, plural
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector
from mmrl.rollout.experience import Memory, retried
from mmrl.rollout.partial import PartialCollector
from mmrl.rollout.unfinished import CarriedGroup, finished_among, unfinished_among
from mmrl.step.given import Comparisons, Given, check_demonstration, check_length
from mmrl.step.source import Draw, Find, Left, Source, check_question
from mmrl.system.clock import Clock
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, RolloutGroup, ScoredGroup


class Rollouts(Source):
    """Completions of the policy itself, scored by rewards."""

    samples, texts = True, "completions"

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        encoder: PromptEncoder,
        collector: Collector,
        event: Callable[..., None],
    ) -> None:
        super().__init__(config, algorithm, encoder, collector, event)
        collector.shown = encoder.demonstrate if algorithm.needs().demonstration else None

    @classmethod
    def check_row(cls, prompt: Prompt, config: Config, needs: Needs, encoder: PromptEncoder) -> None:
        check_question(prompt)
        if needs.demonstration:
            check_demonstration(prompt)
            shown = encoder.demonstrate(encoder.rendered(prompt))
            check_length("the demonstration", [shown], prompt, config)

    def make(self, prompt: Prompt) -> EncodedPrompt:
        return self._encoder.encode(prompt)

    def gather(self, step: int, draw: Draw, clock: Clock, version: int | None = None) -> SampledStep:
        def seen(number: int) -> Sequence[tuple[int, EncodedPrompt]]:
            return [(epoch, self._views(replace(prompt, epoch=epoch), step)) for epoch, prompt in draw(number)]

        try:
            found = self._sampled(step, seen, clock, version)
        except SamplersRestarted:
            raise
        except MMRLError as error:  # such as too many failures of rewards
            if not (lost := self._collector.generated):
                raise
            unscored = [_unscored(group, (0, place)) for place, group in enumerate(lost)]
            return SampledStep(step, lost[0].rollouts[0].weight_version, unscored, fault=error)
        self.left = replace(self.left, carried=found.carried)
        found = replace(found, stats={**found.stats, **self._views.metrics(step)})
        if len(found.learned) < self._config.trainer.prompts_per_step:
            found = self._starved(found)
        if found.fault is None and not any(group.valid.any() for group in found.groups):
            self._event("unscored", message=f"no rollout of step {step} could be scored")
        return found

    def _sampled(self, step: int, draw: Draw, clock: Clock, version: int | None) -> SampledStep:
        if isinstance(self._collector, PartialCollector):
            return self._collector.partial_groups(step, self._algorithm, draw, self.left.carried, clock, version)
        carried = finished_among(self.left.carried)
        wanted = self._config.trainer.prompts_per_step - len(carried)
        needs, retries = self._algorithm.needs(), type(self._algorithm).retry is not Algorithm.retry
        memory = Memory(self._algorithm, self.left.kept) if needs.experience else None
        found = self._collector.training_groups(
            step,
            self._algorithm,
            draw,
            wanted,
            clock,
            version,
            again=partial(self._again, step) if retries else lambda group: None,
            memory=memory,
        )
        if memory is not None:
            self.left = replace(self.left, kept=memory.kept)
        return replace(found, learned=[*carried, *found.learned])

    def _again(self, step: int, group: ScoredGroup) -> EncodedPrompt | None:
        """The prompt to sample in place of a rejected group, with the group's images; None for the next row."""
        row, most = retried(self._algorithm, group), self._config.data.max_prompt_tokens
        if row is None:
            return None
        prompt = self._encoder.reworded(group.group.prompt, row)
        if len(prompt.token_ids) > most:
            length = plural(len(prompt.token_ids), "token")
            what = f"row {row.id} with the messages to retry has {length}, and data.max_prompt_tokens is {most}"
            self._event("warning", message=f"step {step}: {what}; the next row is sampled in its place", step=step)
            return None
        return self._views(prompt, step)

    def resumed(self, left: Left, find: Find) -> Left:
        keys = {group.key for group in unfinished_among(left.carried)}
        in_parts = self._config.sampler.partial is not None
        if left.in_parts and left.carried and not in_parts:
            raise ConfigError(
                f"the checkpoint has {plural(len(left.carried), 'group')} in flight, {len(keys)} of them still to be "
                "sampled in part, and no step would learn from such groups",
                where="sampler.partial: null",
                remedy="set sampler.partial as the run had it",
            )
        left = replace(left, in_parts=in_parts)
        if not keys or self._config.environment is None:
            return left
        rows = find(keys)
        if lost := keys - rows.keys():
            raise DataError(
                f"{plural(len(lost), 'row')} of episodes that go on cannot be found among those that were drawn",
                where=", ".join(name for _, name in sorted(lost)[:3]),
                remedy="train on the data that the run began with",
            )

        def with_row(group: CarriedGroup) -> CarriedGroup:
            if isinstance(group, ScoredGroup):
                return group
            return replace(group, row=self._encoder.encode(rows[group.key]).prompt)

        return replace(left, carried=list(map(with_row, left.carried)))

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
            skipped = [replace(group, place=None) for group in found.learned]
            self.left = replace(self.left, carried=[*skipped, *found.carried])
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
