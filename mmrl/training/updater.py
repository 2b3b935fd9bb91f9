"""From what was sampled to an optimizer step: log-probs, credit, minibatches, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Learner
from mmrl.errors import NumericsError
from mmrl.interfaces import Algorithm
from mmrl.ops import metrics
from mmrl.ops.objective import advantages_per_token, assign_credit, loss_masks, training_rows
from mmrl.ops.packing import offsets
from mmrl.rollout.collector import Collected
from mmrl.system.clock import Clock
from mmrl.system.signals import Interruption
from mmrl.types import (
    Batch,
    BoolArray,
    CreditedGroup,
    FloatArray,
    IntArray,
    PreUpdateStatistics,
    Rollout,
    Sample,
    ScoredGroup,
    TrainingRow,
)

MAX_FAULTS = 3
"""Optimizer steps in a row that may come to nothing because a number is not finite."""


class UpdateRecorder(Protocol):
    """Where the optimizer steps of a run are noted."""

    def trained(self, step: int, update: int, samples: Sequence[tuple[int, str, int]]) -> None:
        """The (epoch, prompt id, member) that entered an optimizer step."""
        ...

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

    @classmethod
    def of_groups(cls, groups: Sequence[ScoredGroup], collected: Collected) -> Self:
        """To train on every rollout of ``groups``."""
        return cls(_rollouts(groups), groups, collected)

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


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a step's optimizer steps.

    Attributes:
        metrics: Their means.
        logprobs: Of each sample, before them; none where it is in no loss, unless they were asked for, nor where the
            only step was skipped.
        updates: See ``CreditedGroup``.
    """

    metrics: Mapping[str, float]
    logprobs: Sequence[FloatArray]
    updates: Sequence[Sequence[PreUpdateStatistics]]


class Updater:
    """Assigns credit and takes a step's optimizer steps.

    Args:
        make_batch: Makes the batch of some groups, as ``Collector.batch``.

    Attributes:
        updates: Optimizer steps taken so far.
        faults_in_a_row: How many of the last ones came to nothing.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        make_batch: Callable[[Sequence[ScoredGroup]], Batch],
        recorder: UpdateRecorder,
        interruption: Interruption,
    ) -> None:
        self._config, self._algorithm, self._make_batch = config, algorithm, make_batch
        self._recorder, self._interruption = recorder, interruption
        self.updates = self.faults_in_a_row = 0

    def learn(self, step: int, experience: Experience, learner: Learner, clock: Clock) -> Lesson:
        """Assign credit and update.

        Args:
            experience: Has samples.

        Raises:
            NumericsError: Too many optimizer steps in a row came to nothing.
            PluginError: The algorithm fails.
            Stopped: A signal came before the first optimizer step; none was taken.
        """
        samples = experience.samples
        with clock.phase("logprob"):
            batch = self._with_logprobs(experience, learner)
        with clock.phase("credit"):
            credit = assign_credit(self._algorithm, batch)
            masks = loss_masks(batch, credit)
            advantages = advantages_per_token(credit, masks)
        self._interruption.check()
        with clock.phase("update"):
            outcome = self._update(step, samples, batch, masks, advantages, credit.constants, learner, clock)
        values = {**outcome.metrics, **credit.metrics, **metrics.advantage_metrics(masks, advantages)}
        return Lesson(values, _credited(experience.groups, batch, advantages, outcome))

    def _with_logprobs(self, experience: Experience, learner: Learner) -> Batch:
        """The batch with the log-probs that the algorithm asks for, or that several optimizer steps need."""
        needs, config, samples = self._algorithm.needs(), self._config.learner, experience.samples
        batch = self._make_batch(experience.groups) if experience.groups else _demonstrations(samples)
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
        clock: Clock,
    ) -> _Outcome:
        """Take the step's optimizer steps."""
        config = self._config.learner
        aggregation = self._algorithm.aggregation.with_default(self._config.sampler.max_new_tokens)
        logprobs = list(batch.old_logprobs or [np.zeros(0, np.float32)] * len(samples))
        updates: list[list[PreUpdateStatistics]] = [[] for _ in samples]
        steps: list[Mapping[str, float]] = []
        skipped, memory = 0, list[float]()
        for part in minibatches(batch.group_ids, config.minibatches, config.epochs, (self._config.trainer.seed, step)):
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
            clock.count("update", sum(int(row.mask.sum()) for row in rows.values()))
            clock.count_flops(result.flops)
            memory += [] if result.memory_bytes is None else [float(result.memory_bytes)]
            if result.fault:
                skipped += 1
                self._report_fault(step, result.fault, list(rows.values()))
                for index in rows:  # they may be as little finite as what was made of them
                    updates[index].append(PreUpdateStatistics(np.zeros(0, np.float32), np.zeros(0, np.float32)))
                    if not np.isfinite(logprobs[index]).all():
                        logprobs[index] = np.zeros(0, np.float32)
                continue
            self.faults_in_a_row = 0
            if result.notice:
                self._recorder.event("adapted", message=result.notice, step=step)
            steps.append(result.metrics)
            if rows:
                self.updates += 1
                self._recorder.trained(step, self.updates, [_name(samples[index]) for index in rows])
            for index, *values in zip(rows, result.logprobs, result.entropies, strict=True):
                updates[index].append(PreUpdateStatistics(*values))
                if batch.old_logprobs is None:
                    logprobs[index] = values[0]
            self._recorder.progress("update", len(steps), config.minibatches * config.epochs)
        means = metrics.average(steps) | {"policy/skipped_updates": float(skipped)}
        means |= {"perf/update_memory_bytes_max": max(memory)} if memory else {}
        return _Outcome(means, logprobs, updates)

    def _report_fault(self, step: int, fault: str, rows: Sequence[TrainingRow]) -> None:
        """Note an optimizer step that came to nothing, with what it was made of.

        Raises:
            NumericsError: It is one of too many in a row.
        """
        self.faults_in_a_row += 1
        advantages = np.concatenate([np.zeros(0), *(row.advantages for row in rows)])
        self._recorder.event(
            "update_skipped",
            message=f"no optimizer step was taken in step {step}: {fault}",
            step=step,
            in_a_row=self.faults_in_a_row,
            samples=sorted({row.sample.prompt.id for row in rows}),
            completion_tokens=[len(row.mask) for row in rows],
            advantages={"min": float(advantages.min(initial=0)), "max": float(advantages.max(initial=0))},
            weights=[row.weight for row in rows],
        )
        if self.faults_in_a_row >= MAX_FAULTS:
            raise NumericsError(
                f"{MAX_FAULTS} optimizer steps in a row came to nothing: {fault}",
                where=f"step {step}; events.jsonl has the samples and statistics of each, RUN/rollouts the rollouts",
                remedy="lower learner.lr; the last checkpoint is good",
            )


def minibatches(group_ids: IntArray, parts: int, epochs: int, seed: Sequence[int]) -> Iterator[list[int]]:
    """Sample indices of each optimizer step: every epoch covers all, in an order of its own if there are parts.

    Groups stay whole, as their completions share a prompt; unless there are fewer than parts.
    """
    _, units = np.unique(group_ids, return_inverse=True)
    if units.max(initial=0) + 1 < parts:
        units = np.arange(len(group_ids))
    for epoch in range(epochs):
        order = np.arange(units.max(initial=-1) + 1)
        if parts > 1:
            np.random.default_rng([*seed, epoch]).shuffle(order)
        yield from (np.flatnonzero(np.isin(units, part)).tolist() for part in np.array_split(order, parts) if len(part))


def _name(sample: Sample) -> tuple[int, str, int]:
    """(epoch, prompt id, member) of a rollout or a demonstration."""
    return sample.prompt.epoch, sample.prompt.id, sample.index if isinstance(sample, Rollout) else 0


def _rollouts(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.group.rollouts]


def _credited(
    groups: Sequence[ScoredGroup], batch: Batch, advantages: Sequence[FloatArray], outcome: _Outcome
) -> list[CreditedGroup]:
    bounds = offsets([len(group.group.rollouts) for group in groups])
    return [
        CreditedGroup(
            scored=group,
            kept=True,
            advantages=advantages[start:end],
            logprobs=outcome.logprobs[start:end],
            trained=True,
            reference_logprobs=(batch.reference_logprobs or ())[start:end],
            updates=outcome.updates[start:end],
        )
        for group, start, end in zip(groups, bounds, bounds[1:], strict=False)
    ]


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
