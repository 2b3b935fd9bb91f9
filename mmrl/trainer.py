"""The loop: sample, score, assign credit, update; it knows no algorithm, no engine and no file format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmrl import metrics
from mmrl.clock import Clock
from mmrl.collection import Collected, Collector
from mmrl.config import Config
from mmrl.errors import MMRLError, NumericsError, RankLostError, ResourceError, plugin_errors
from mmrl.interfaces import Algorithm, Engine, Learner, PromptEncoder
from mmrl.interruption import Interruption, Stopped
from mmrl.ops.objective import advantages_per_token, assign_credit, loss_masks, training_rows
from mmrl.ops.packing import offsets
from mmrl.ops.parity import Gap
from mmrl.prompts import PromptSource
from mmrl.rollout_records import group_records, read_groups
from mmrl.types import (
    Batch,
    BoolArray,
    CreditedGroup,
    FloatArray,
    Rollout,
    RolloutGroup,
    Sample,
    ScoredGroup,
    TrainingRow,
)
from mmrl.watchdog import Watchdog

CHECKED_SAMPLES = 12
"""Samples of the first batch that are computed one by one as well as packed."""
MAX_FAULTS = 3
"""Optimizer steps in a row that may come to nothing because a number is not finite."""


class Recorder(Protocol):
    """Where a run's numbers go: its folder, the trackers and the console."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[CreditedGroup]) -> None: ...

    def trained(self, step: int, update: int, samples: Sequence[tuple[int, str, int]]) -> None:
        """The (epoch, prompt id, member) that entered an optimizer step."""
        ...

    def save(self, learner: Learner, step: int, values: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Keep what the run can go on from.

        Raises:
            ResourceError: The disk is full or cannot be written; nothing has changed.
        """
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

    A step is done or not: a signal before its first optimizer step discards what was sampled, which is sampled again in
    the same way when the run goes on; one that comes later waits for the step to be done and saved.

    Args:
        evaluation: Held-out prompts; None evaluates nothing.
        precision: ``float32`` or ``bfloat16``; decides how far sampler and learner may disagree.
        interruption: What signals do.
        watchdog: Watches every step, evaluation and checkpoint.

    Attributes:
        consumed_prompts: Prompts taken from the data order so far: the position of the next one.
        carried_groups: Kept by the algorithm in steps that were skipped, to be used first in the next one. The weights
            have not moved since they were sampled.
        updates: Optimizer steps taken so far.
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
        interruption: Interruption,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._algorithm, self._engine = config, algorithm, engine
        self._encoder, self._collector = encoder, collector
        self._train, self._evaluation = train, evaluation
        self._recorder, self._precision = recorder, precision
        self._interruption, self._watchdog = interruption, watchdog
        self._order = train.order(config.trainer.seed)
        self.consumed_prompts = self.updates = 0
        self.carried_groups: list[ScoredGroup] = []
        self._faults_in_a_row = 0
        self._saved: int | None = None
        self._is_checked = False

    def fit(
        self, done: int | None = None, pending: Mapping[str, float] | None = None, *, is_saved: bool = True
    ) -> None:
        """Train up to step ``trainer.steps``.

        Args:
            done: The step of the checkpoint that engine and trainer were restored from; None for a new run.
            pending: What that step came to, if it has not been evaluated and logged; None if it has.
            is_saved: Whether that checkpoint is one of this run.

        Raises:
            MMRLError: A plugin fails, or the numbers do not agree.
            Stopped: A signal came; there is a checkpoint, unless a ResourceError tells that it cannot be written.
        """
        self._saved = done if is_saved else None
        with self._interruption.deferred():
            if done is None:
                done, pending = 0, {}
                self._save(0, {}, self.state(), needed=False)
            elif not is_saved:
                self._save(done, pending or {}, self.state(), needed=True)
            if pending is not None:
                self._conclude(done, pending)
            for step in range(done + 1, self._config.trainer.steps + 1):
                self._step(step)

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs besides weights and optimizer, as JSON can hold it."""
        with plugin_errors(self._algorithm, "state"):
            algorithm = dict(self._algorithm.state())
        return {
            "consumed_prompts": self.consumed_prompts,
            "updates": self.updates,
            "faults_in_a_row": self._faults_in_a_row,
            "carried_groups": group_records(self.carried_groups),
            "algorithm": algorithm,
        }

    def restore(self, state: Mapping[str, Any], media: Path) -> None:
        """Go on where ``state`` was asked.

        Args:
            media: Where the images of carried groups are.
        """
        self.consumed_prompts, self.updates = int(state["consumed_prompts"]), int(state["updates"])
        self._faults_in_a_row = int(state["faults_in_a_row"])
        self.carried_groups = read_groups(state["carried_groups"], media)
        if state["algorithm"]:
            with plugin_errors(self._algorithm, "restore"):
                self._algorithm.restore(state["algorithm"])

    def _step(self, step: int) -> None:
        """A step, its checkpoint and its evaluation."""
        before, config = self.state(), self._config.trainer
        try:
            with self._watchdog.watch(f"step {step}"):
                values = self.train_step(step)
        except Stopped:  # no optimizer step was taken: the one before is where the run goes on
            if self._saved != step - 1:
                self._save(step - 1, {}, before, needed=True)
            raise
        needed = step == config.steps or self._interruption.stopped is not None
        if needed or step % config.save_every == 0:  # before the evaluation: whatever fails there, they are kept
            try:
                self._save(step, values, self.state(), needed=needed)
            except BaseException:
                self._recorder.log(step, values)
                raise
        self._conclude(step, values)
        self._interruption.check()

    def _save(self, step: int, values: Mapping[str, float], state: Mapping[str, Any], *, needed: bool) -> None:
        """Write a checkpoint; one that is not ``needed`` may fail, if only for want of room."""
        try:
            with self._watchdog.watch(f"the checkpoint of step {step}"), self._engine.learning() as learner:
                self._recorder.save(learner, step, values, state)
            self._saved = step
        except RankLostError:
            raise
        except ResourceError as error:
            self._recorder.event("checkpoint_failed", message=str(error), step=step)
            if needed:
                raise

    def _conclude(self, step: int, values: Mapping[str, float]) -> None:
        """Evaluate a finished step if that is due, and log it."""
        config = self._config.trainer
        is_due = self._evaluation is not None and (step in (0, config.steps) or step % config.eval_every == 0)
        found: Mapping[str, float] = {}
        try:
            if is_due:
                with self._watchdog.watch(f"the evaluation of step {step}"), self._interruption.immediate():
                    found = self._evaluate()
        except Stopped:  # the run goes on with this evaluation
            if self._saved != step:
                self._save(step, values, self.state(), needed=True)
            raise
        except BaseException:  # the step is done, whatever happens to its evaluation
            self._recorder.log(step, values)
            raise
        self._recorder.log(step, {**values, **found})

    def train_step(self, step: int) -> dict[str, float]:
        """Sample, score, assign credit, update; returns the step's metrics."""
        clock = Clock()
        with self._interruption.immediate():
            experience, lesson = self._collect(step, clock), Lesson()
        self._interruption.check()
        try:
            with self._engine.learning() as learner:
                if not self._is_checked:
                    self._self_check(experience, learner)
                    self._is_checked = True
                if experience.samples:
                    lesson = self._learn(step, experience, learner, clock)
        finally:  # what was sampled is on disk before its numbers can stop the run
            if experience.collected is not None:
                self._recorder.rollouts(step, _all_groups(experience.collected, lesson.groups))
        values = {**lesson.metrics, **self._describe(step, experience), **self._mismatch(step, lesson)}
        if values.get("advantage/abs_mean") == 0:
            self._recorder.event("no_signal", message=f"step {step} taught nothing: every advantage is 0", step=step)
        values |= clock.metrics(sum(sample.num_tokens for sample in experience.sampled))
        with plugin_errors(self._algorithm, "observe"):
            return values | dict(self._algorithm.observe(dict(values)))

    def _evaluate(self) -> dict[str, float]:
        return {} if self._evaluation is None else self._collector.evaluate(self._evaluation)

    def _collect(self, step: int, clock: Clock) -> Experience:
        count = self._config.trainer.prompts_per_step
        if self._algorithm.source == "demonstrations":
            drawn = self._train.draw(count, self._take, lambda p: self._encoder.demonstrate(self._encoder.encode(p)))
            return Experience([replace(s, prompt=replace(s.prompt, epoch=epoch)) for epoch, s in drawn])
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
        self._interruption.check()
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

        A sample that is in no loss has no log-probs, unless they were asked for; nor has one of a skipped step.
        """
        config = self._config.learner
        aggregation = self._algorithm.aggregation.with_default(self._config.sampler.max_new_tokens)
        logprobs = list(batch.old_logprobs or [np.zeros(0, np.float32)] * len(samples))
        steps: list[Mapping[str, float]] = []
        skipped = 0
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
            if result.fault:
                skipped += 1
                self._report_fault(step, result.fault, list(rows.values()))
                for index in rows:  # they may be as little finite as what was made of them
                    logprobs[index] = np.zeros(0, np.float32)
                continue
            self._faults_in_a_row = 0
            if result.notice:
                self._recorder.event("adapted", message=result.notice, step=step)
            steps.append(result.metrics)
            if rows:
                self.updates += 1
                self._recorder.trained(step, self.updates, [_name(samples[index]) for index in rows])
            if batch.old_logprobs is None:
                for index, values in zip(rows, result.logprobs, strict=True):
                    logprobs[index] = values
            self._recorder.progress("update", len(steps), config.minibatches * config.epochs)
        return metrics.average(steps) | {"policy/skipped_updates": float(skipped)}, logprobs

    def _report_fault(self, step: int, fault: str, rows: Sequence[TrainingRow]) -> None:
        """Note an optimizer step that came to nothing, with what it was made of.

        Raises:
            NumericsError: It is one of too many in a row.
        """
        self._faults_in_a_row += 1
        advantages = np.concatenate([np.zeros(0), *(row.advantages for row in rows)])
        self._recorder.event(
            "update_skipped",
            message=f"no optimizer step was taken in step {step}: {fault}",
            step=step,
            in_a_row=self._faults_in_a_row,
            samples=sorted({row.sample.prompt.id for row in rows}),
            completion_tokens=[len(row.mask) for row in rows],
            advantages={"min": float(advantages.min(initial=0)), "max": float(advantages.max(initial=0))},
            weights=[row.weight for row in rows],
        )
        if self._faults_in_a_row >= MAX_FAULTS:
            raise NumericsError(
                f"{MAX_FAULTS} optimizer steps in a row came to nothing: {fault}",
                where=f"step {step}; events.jsonl has the samples and statistics of each, RUN/rollouts the rollouts",
                remedy="lower learner.lr; the last checkpoint is good",
            )

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


def _name(sample: Sample) -> tuple[int, str, int]:
    """(epoch, prompt id, member) of a rollout or a demonstration."""
    return sample.prompt.epoch, sample.prompt.id, sample.index if isinstance(sample, Rollout) else 0


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
