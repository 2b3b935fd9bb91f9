"""From samples to optimizer steps: log-probs, credit, minibatches, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Learner
from mmrl.errors import NumericsError
from mmrl.interfaces import Algorithm
from mmrl.ops import metrics
from mmrl.ops.objective import advantages_per_token, assign_credit, loss_masks, training_rows
from mmrl.ops.packing import offsets
from mmrl.system.clock import Clock
from mmrl.system.signals import Interruption
from mmrl.types import (
    Batch,
    CreditedGroup,
    FloatArray,
    IntArray,
    PreUpdateStatistics,
    Sample,
    SampleKey,
    ScoredGroup,
    TrainingRow,
)

MAX_FAULTS = 3
"""Optimizer steps in a row that may come to nothing because a number is not finite."""


class UpdateRecorder(Protocol):
    """The recorder of a run's optimizer steps."""

    def trained(self, step: int, update: int, samples: Sequence[SampleKey]) -> None:
        """The samples that entered an optimizer step."""
        ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples that one step learns from.

    Attributes:
        samples: B samples to train on, at least one.
        batch: The same as ``Algorithm.credit`` sees them, without learner log-probs yet.
        groups: The scored groups that they come from, in order; empty for demonstrations.
    """

    samples: Sequence[Sample]
    batch: Batch
    groups: Sequence[ScoredGroup] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step's optimizer steps.

    Attributes:
        groups: Groups that were trained on, in order.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[CreditedGroup] = ()


class Updater:
    """Assigns credit and takes a step's optimizer steps.

    Attributes:
        updates: Optimizer steps taken so far.
        faults_in_a_row: The number of the last ones in a row that came to nothing.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        recorder: UpdateRecorder,
        interruption: Interruption,
    ) -> None:
        self._config, self._algorithm = config, algorithm
        self._recorder, self._interruption = recorder, interruption
        self.updates = self.faults_in_a_row = 0

    def learn(self, step: int, train: TrainBatch, learner: Learner, clock: Clock) -> StepResult:
        """Assign credit and update.

        Raises:
            NumericsError: Too many optimizer steps in a row came to nothing.
            PluginError: The algorithm fails.
            Stopped: A signal came before the first optimizer step; none was taken.
        """
        with clock.phase("logprob"):
            train = self._with_logprobs(train, learner)
        batch = train.batch
        with clock.phase("credit"):
            credit = assign_credit(self._algorithm, batch)
            masks = loss_masks(batch, credit)
            advantages = advantages_per_token(credit, masks)
        self._interruption.check()
        rows_of = partial(
            training_rows,
            train.samples,
            masks,
            advantages,
            batch.group_ids,
            self._algorithm.aggregation.with_default(self._config.sampler.max_new_tokens),
            old_logprobs=batch.old_logprobs,
            reference_logprobs=batch.reference_logprobs,
            constants=credit.constants,
        )
        with clock.phase("update"):
            means, logprobs, updates = self._update(step, train, rows_of, learner, clock)
        values = {**means, **credit.metrics, **metrics.advantage_metrics(masks, advantages)}
        return StepResult(values, _credited(train, advantages, logprobs, updates))

    def _with_logprobs(self, train: TrainBatch, learner: Learner) -> TrainBatch:
        """The batch with the log-probs that the algorithm asks for, or that several optimizer steps need."""
        needs, config, samples = self._algorithm.needs(), self._config.learner, train.samples
        several_steps = config.minibatches * config.epochs > 1
        old = _of_each(samples, learner.logprobs) if needs.old_logprobs or several_steps else None
        reference = _of_each(samples, learner.reference_logprobs) if needs.reference_logprobs else None
        return replace(train, batch=replace(train.batch, old_logprobs=old, reference_logprobs=reference))

    def _update(
        self,
        step: int,
        train: TrainBatch,
        rows_of: Callable[[Sequence[int]], Mapping[int, TrainingRow]],
        learner: Learner,
        clock: Clock,
    ) -> tuple[Mapping[str, float], list[FloatArray], list[list[PreUpdateStatistics]]]:
        """Take the step's optimizer steps.

        Returns:
            The means of their metrics; each sample's log-probs before them, empty if it is in no loss and they were not
            asked for, or if they are not known; the statistics of each optimizer step that took the sample in.
        """
        config, samples, batch = self._config.learner, train.samples, train.batch
        logprobs = list(batch.old_logprobs or [np.zeros(0, np.float32)] * len(samples))
        updates: list[list[PreUpdateStatistics]] = [[] for _ in samples]
        steps: list[Mapping[str, float]] = []
        skipped, memory = 0, list[float]()
        for part in minibatches(batch.group_ids, config.minibatches, config.epochs, (self._config.trainer.seed, step)):
            rows = rows_of(part)
            result = learner.update(list(rows.values()))
            clock.count("update", sum(int(row.mask.sum()) for row in rows.values()))
            clock.count_flops(result.flops)
            memory += [] if result.memory_bytes is None else [float(result.memory_bytes)]
            if result.fault:
                skipped += 1
                self._report_fault(step, result.fault, list(rows.values()))
                for index in rows:  # they may not be finite either
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
                self._recorder.trained(step, self.updates, [samples[index].key for index in rows])
            for index, *values in zip(rows, result.logprobs, result.entropies, strict=True):
                updates[index].append(PreUpdateStatistics(*values))
                if batch.old_logprobs is None:
                    logprobs[index] = values[0]
            self._recorder.progress("update", len(steps), config.minibatches * config.epochs)
        means = metrics.average(steps) | {"policy/skipped_updates": float(skipped)}
        means |= {"perf/update_memory_bytes_max": max(memory)} if memory else {}
        return means, logprobs, updates

    def _report_fault(self, step: int, fault: str, rows: Sequence[TrainingRow]) -> None:
        """Note an optimizer step that came to nothing, with its rows.

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


def _of_each(
    samples: Sequence[Sample], logprobs: Callable[[Sequence[Sample]], Sequence[FloatArray]]
) -> list[FloatArray]:
    """Each sample's log-probs; none of an episode without tokens, which failed in ``reset`` and cannot be packed."""
    places = [place for place, sample in enumerate(samples) if len(sample.token_ids)]
    found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for place, values in zip(places, logprobs([samples[place] for place in places]) if places else (), strict=True):
        found[place] = values
    return found


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


def _credited(
    train: TrainBatch,
    advantages: Sequence[FloatArray],
    logprobs: Sequence[FloatArray],
    updates: Sequence[Sequence[PreUpdateStatistics]],
) -> list[CreditedGroup]:
    bounds = offsets([len(group.rollouts) for group in train.groups])
    return [
        CreditedGroup(
            scored=group,
            advantages=advantages[start:end],
            logprobs=logprobs[start:end],
            trained=True,
            reference_logprobs=(train.batch.reference_logprobs or ())[start:end],
            updates=updates[start:end],
        )
        for group, start, end in zip(train.groups, bounds, bounds[1:], strict=False)
    ]


def demonstrations_batch(samples: Sequence[Sample]) -> Batch:
    """Demonstrations as one batch; nothing scores them."""
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
