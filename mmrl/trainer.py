"""The loop: sample, score, assign credit, update; it knows no algorithm, no engine and no file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mmrl import metrics
from mmrl.clock import Clock
from mmrl.collection import Collected, Collector
from mmrl.config import Config
from mmrl.errors import MMRLError, NumericsError, plugin_errors
from mmrl.interfaces import Algorithm, Engine, Learner, PromptEncoder
from mmrl.ops.objective import advantages_per_token, assign_credit, loss_masks, training_rows
from mmrl.ops.packing import offsets
from mmrl.ops.parity import Gap
from mmrl.prompts import PromptSource
from mmrl.types import Batch, BoolArray, CreditedGroup, FloatArray, Rollout, RolloutGroup, Sample, ScoredGroup

CHECKED_SAMPLES = 12
"""Samples of the first batch that are computed one by one as well as packed."""


class Recorder(Protocol):
    """Where a run's numbers go: its folder, the trackers and the console."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[CreditedGroup]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Experience:
    """What one step learns from.

    Attributes:
        samples: B samples to train on, none if the step had to be left out.
        groups: The scored groups that they come from, in order; empty for demonstrations.
        collected: What was sampled in this step; None for demonstrations.
    """

    samples: Sequence[Sample]
    groups: Sequence[ScoredGroup] = ()
    collected: Collected | None = None

    @property
    def sampled(self) -> Sequence[Sample]:
        """What was sampled in this step, kept or not; the samples themselves for demonstrations."""
        return self.samples if self.collected is None else _rollouts(self.collected.groups)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What was learned from an experience.

    Attributes:
        groups: Those of the experience, in order.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[CreditedGroup] = ()


class Trainer:
    """Runs an algorithm.

    Args:
        evaluation: Held-out prompts; None evaluates nothing.
        precision: ``float32`` or ``bfloat16``; decides how far sampler and learner may disagree.

    Attributes:
        consumed_prompts: Prompts taken from the data order so far: the position of the next one.
        carried_groups: Kept by the algorithm in steps that were skipped, to be used first in the next one. The weights
            have not moved since they were sampled.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        engine: Engine,
        encoder: PromptEncoder,
        collector: Collector,
        train: PromptSource,
        evaluation: PromptSource | None,
        recorder: Recorder,
        *,
        precision: str,
    ) -> None:
        self._config, self._algorithm, self._engine = config, algorithm, engine
        self._encoder, self._collector = encoder, collector
        self._train, self._evaluation = train, evaluation
        self._recorder, self._precision = recorder, precision
        self._order = train.order(config.trainer.seed)
        self.consumed_prompts = 0
        self.carried_groups: list[ScoredGroup] = []

    def fit(self, save: Callable[[Learner, int], None]) -> None:
        """Train for ``trainer.steps`` steps.

        Args:
            save: Called with the learner and the step when weights are to be kept, after the last step always.

        Raises:
            MMRLError: A plugin fails, or the numbers do not agree.
        """
        config = self._config.trainer
        self._recorder.log(0, self._evaluate())
        for step in range(1, config.steps + 1):
            values = self.train_step(step)
            last = step == config.steps
            try:
                if last or step % config.save_every == 0:  # before the evaluation: whatever fails there, they are kept
                    with self._engine.learning() as learner:
                        save(learner, step)
                if last or step % config.eval_every == 0:
                    values |= self._evaluate()
            finally:  # the step is done, whatever happens to its checkpoint and its evaluation
                self._recorder.log(step, values)

    def train_step(self, step: int) -> dict[str, float]:
        """Sample, score, assign credit, update; returns the step's metrics."""
        clock = Clock()
        experience, lesson = self._collect(step, clock), Lesson()
        try:
            with self._engine.learning() as learner:
                if step == 1:
                    self._self_check(experience, learner)
                if experience.samples:
                    lesson = self._learn(step, experience, learner, clock)
        finally:  # what was sampled is on disk before its numbers can stop the run
            if experience.collected is not None:
                self._recorder.rollouts(step, _all_groups(experience.collected, lesson.groups))
        values = {**lesson.metrics, **self._describe(step, experience), **self._mismatch(step, lesson)}
        values |= clock.metrics(sum(sample.num_tokens for sample in experience.sampled))
        with plugin_errors(self._algorithm, "observe"):
            return values | dict(self._algorithm.observe(dict(values)))

    def _evaluate(self) -> dict[str, float]:
        return {} if self._evaluation is None else self._collector.evaluate(self._evaluation)

    def _collect(self, step: int, clock: Clock) -> Experience:
        count = self._config.trainer.prompts_per_step
        if self._algorithm.source == "demonstrations":
            drawn = self._train.draw(count, self._take, lambda p: self._encoder.demonstrate(self._encoder.encode(p)))
            return Experience([sample for _, sample in drawn])
        carried, self.carried_groups = self.carried_groups, []
        wanted = count - len(carried)
        try:
            found = self._collector.training_groups(self._algorithm, self._train, self._take, wanted, clock)
        except MMRLError:  # such as too many failures of rewards
            if lost := self._collector.generated:
                self._recorder.rollouts(step, [_not_trained_on(_unscored(group), False) for group in lost])
            raise
        groups = [*carried, *found.kept_groups]
        if len(groups) < count:
            groups = self._starve(step, groups, found)
        return Experience(_rollouts(groups), groups, found)

    def _take(self, count: int) -> list[tuple[int, int]]:
        """The next (epoch, row) of the data order; they are consumed."""
        rows = self._order.take(self.consumed_prompts, count)
        self.consumed_prompts += count
        return rows

    def _starve(self, step: int, groups: list[ScoredGroup], found: Collected) -> list[ScoredGroup]:
        """What to train on where the algorithm rejected too much: it said itself what to do then.

        Raises:
            NumericsError: To stop.
        """
        refill, wanted = self._algorithm.needs().refill, self._config.trainer.prompts_per_step
        assert refill is not None, "only what may be rejected can be missing"
        rate = sum(found.kept) / len(found.kept)
        what = (
            f"step {step} has {len(groups)} of {wanted} groups: {rate:.1%} of the {len(found.kept)} sampled were kept"
        )
        self._recorder.event("starved", message=what, step=step, acceptance_rate=rate, action=refill.on_starvation)
        if refill.on_starvation == "stop":
            self._recorder.rollouts(step, _all_groups(found, ()))
            raise NumericsError(
                f"the algorithm rejects too many groups: {what}",
                where=f"algorithm: {self._config.algorithm.name}, after {found.rounds} rounds of sampling",
                remedy="use prompts that the policy gets right sometimes and not always, raise sampler.group_size, "
                "or let the algorithm sample more rounds or train on smaller batches",
            )
        if refill.on_starvation == "skip":
            self.carried_groups = groups
            return []
        return groups

    def _learn(self, step: int, experience: Experience, learner: Learner, clock: Clock) -> Lesson:
        """Assign credit and update."""
        samples = experience.samples
        with clock.phase("logprob"):
            batch = self._with_logprobs(experience, learner)
        credit = assign_credit(self._algorithm, batch)
        masks = loss_masks(batch, credit)
        advantages = advantages_per_token(credit, masks)
        with clock.phase("update"):
            values, logprobs = self._update(step, samples, batch, masks, advantages, credit.constants, learner)
        values |= dict(credit.metrics) | metrics.advantage_metrics(masks, advantages)
        return Lesson(values, _credited(experience.groups, advantages, logprobs))

    def _describe(self, step: int, experience: Experience) -> dict[str, float]:
        """Metrics of all that was sampled."""
        found = experience.collected
        if found is None:
            masks = [sample.mask for sample in experience.samples]
            return metrics.length_metrics(masks, np.zeros(len(masks), bool))
        batch = self._collector.batch(found.groups)
        if not batch.valid.any():
            self._recorder.event("unscored", message=f"no rollout of step {step} could be scored")
        values = metrics.length_metrics(batch.masks, batch.truncated)
        values |= metrics.reward_metrics(batch, self._collector.accuracy_of)
        values |= metrics.failure_metrics("reward", found.failed)
        if self._algorithm.needs().refill is not None:
            values |= metrics.refill_metrics(found.kept, found.rounds)
        return values

    def _with_logprobs(self, experience: Experience, learner: Learner) -> Batch:
        """The batch with the log-probs that the algorithm asks for, or that several optimizer steps need."""
        needs, config, samples = self._algorithm.needs(), self._config.learner, experience.samples
        batch = self._collector.batch(experience.groups) if experience.groups else _demonstrations(samples)
        several_steps = config.minibatches * config.epochs > 1
        old = learner.logprobs(samples) if needs.old_logprobs or several_steps else None
        reference = learner.reference_logprobs(samples) if needs.reference_logprobs else None
        return replace(batch, old_logprobs=old, reference_logprobs=reference)

    def _update(
        self,
        step: int,
        samples: Sequence[Sample],
        batch: Batch,
        masks: Sequence[BoolArray],
        advantages: Sequence[FloatArray],
        constants: Mapping[str, float],
        learner: Learner,
    ) -> tuple[dict[str, float], list[FloatArray]]:
        """Take the step's optimizer steps; returns their mean metrics and each sample's log-probs before them.

        A sample that is in no loss has no log-probs, unless they were asked for.
        """
        config = self._config.learner
        aggregation = self._algorithm.aggregation.with_default(self._config.sampler.max_new_tokens)
        logprobs = list(batch.old_logprobs or [np.zeros(0, np.float32)] * len(samples))
        steps: list[Mapping[str, float]] = []
        for part in minibatches(len(samples), config.minibatches, config.epochs, (self._config.trainer.seed, step)):
            rows = training_rows(
                samples,
                masks,
                advantages,
                batch.group_ids,
                aggregation,
                part,
                old_logprobs=batch.old_logprobs,
                reference_logprobs=batch.reference_logprobs,
                constants=constants,
            )
            result = learner.update(list(rows.values()))
            steps.append(result.metrics)
            if batch.old_logprobs is None:
                for index, values in zip(rows, result.logprobs, strict=True):
                    logprobs[index] = values
            self._recorder.progress("update", len(steps), config.minibatches * config.epochs)
        return metrics.average(steps), logprobs

    def _mismatch(self, step: int, lesson: Lesson) -> dict[str, float]:
        if not lesson.groups:
            return {}
        logprobs = [each for group in lesson.groups for each in group.logprobs]
        gap = _sampler_gap(_rollouts([group.scored for group in lesson.groups]), logprobs)
        self._judge(f"sampler and learner disagree in step {step}", gap)
        return metrics.mismatch_metrics(gap)

    def _self_check(self, experience: Experience, learner: Learner) -> None:
        """On the first batch: packed against one by one, and sampler against learner, before any update.

        On what was sampled, kept or not.
        """
        samples = experience.sampled
        samples = samples[:: max(len(samples) // CHECKED_SAMPLES, 1)][:CHECKED_SAMPLES]
        packed = learner.logprobs(samples)
        single = learner.logprobs(samples, packed=False)
        self._judge("packed and one-by-one log-probs disagree", Gap.between(single, packed))
        if experience.collected:
            self._judge("sampler and learner disagree before the first update", _sampler_gap(samples, packed))

    def _judge(self, what: str, gap: Gap) -> None:
        verdict = gap.verdict(self._precision)
        if verdict == "ok":
            return
        found = f"{what}: mean {gap.abs_mean:.2e}, max {gap.abs_max:.2e} nats in {self._precision}"
        self._recorder.event("mismatch", message=found, verdict=verdict)
        if verdict == "stop" and self._config.trainer.on_mismatch == "stop":
            raise NumericsError(
                found,
                where="the same tokens and the same weights, computed twice",
                possible="the limits in mmrl/ops/parity.py",
                remedy="check sampler.engine and learner.deepspeed for lossy settings; "
                "trainer.on_mismatch: warn trains all the same",
            )


def minibatches(num_samples: int, parts: int, epochs: int, seed: Sequence[int]) -> Iterator[list[int]]:
    """Sample indices of each optimizer step: every epoch covers all, in an order of its own if there are parts."""
    for epoch in range(epochs):
        order = np.arange(num_samples)
        if parts > 1:
            np.random.default_rng([*seed, epoch]).shuffle(order)
        yield from (sorted(part.tolist()) for part in np.array_split(order, parts) if len(part))


def _rollouts(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.group.rollouts]


def _credited(
    groups: Sequence[ScoredGroup], advantages: Sequence[FloatArray], logprobs: Sequence[FloatArray]
) -> list[CreditedGroup]:
    bounds = offsets([len(group.group.rollouts) for group in groups])
    return [
        CreditedGroup(group, True, advantages[start:end], logprobs[start:end])
        for group, start, end in zip(groups, bounds, bounds[1:], strict=False)
    ]


def _all_groups(found: Collected, trained: Sequence[CreditedGroup]) -> list[CreditedGroup]:
    """The groups that were trained on, and then the others that were sampled in the step."""
    others = [pair for pair in zip(found.groups, found.kept, strict=True) if not (trained and pair[1])]
    return [*trained, *(_not_trained_on(group, kept) for group, kept in others)]


def _not_trained_on(group: ScoredGroup, kept: bool) -> CreditedGroup:
    rollouts = group.group.rollouts
    zeros = [np.zeros(len(rollout.token_ids)) for rollout in rollouts]
    return CreditedGroup(group, kept, zeros, [np.zeros(0, np.float32)] * len(rollouts))


def _unscored(group: RolloutGroup) -> ScoredGroup:
    count = len(group.rollouts)
    return ScoredGroup(group, np.zeros(count), np.zeros(count, np.bool_), {})


def _demonstrations(samples: Sequence[Sample]) -> Batch:
    return Batch(
        rewards=np.zeros(len(samples)),
        valid=np.ones(len(samples), bool),
        group_ids=np.arange(len(samples)),
        masks=[sample.mask for sample in samples],
        truncated=np.zeros(len(samples), bool),
        components={},
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[sample.sampler_logprobs for sample in samples],
    )


def _sampler_gap(samples: Sequence[Sample], logprobs: Sequence[FloatArray]) -> Gap:
    """Learner against sampler, on the tokens that the policy wrote, of samples that the learner has seen."""
    seen = [(s, values) for s, values in zip(samples, logprobs, strict=True) if len(values)]
    return Gap.between([s.sampler_logprobs[s.mask] for s, _ in seen], [values[s.mask] for s, values in seen])
