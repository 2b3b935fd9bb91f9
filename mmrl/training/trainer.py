"""The loop: sample, score, assign credit, update; it knows no algorithm, no engine and no file format."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmrl.config.load import suggestion
from mmrl.config.sections import Config
from mmrl.data.prompts import PromptSource
from mmrl.engine_api import Engine, Learner, PromptEncoder
from mmrl.errors import MMRLError, NumericsError, RankLostError, ResourceError, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.ops import metrics
from mmrl.rollout.collector import Collected, Collector, collected_metrics
from mmrl.rollout.prefetch import PromptPrefetcher
from mmrl.rollout.records import group_records, read_groups
from mmrl.system.clock import Clock
from mmrl.system.profiling import Profiler
from mmrl.system.rng_state import generators, seed_generators, set_generators
from mmrl.system.signals import Interruption, Stopped
from mmrl.system.watchdog import Watchdog
from mmrl.training.logprob_check import LogprobCheck
from mmrl.training.updater import Experience, Lesson, Updater, UpdateRecorder
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, RolloutGroup, Sample, ScoredGroup

MAX_HELD_OUT = 4096
"""Encoded prompts of an evaluation that are kept for the next one, a few kB each; more are encoded again."""


class Recorder(UpdateRecorder, Protocol):
    """Where a run's numbers go: its folder, the trackers and the console."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[CreditedGroup], state: Mapping[str, Any]) -> None:
        """All that a step sampled, and the algorithm's state before it."""
        ...

    def save(self, learner: Learner, step: int, values: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Keep what the run can go on from.

        Raises:
            ResourceError: The disk is full or cannot be written; nothing has changed.
        """
        ...


class Trainer:
    """Runs an algorithm.

    A step is done or not: a signal before its first optimizer step discards what was sampled, which is sampled again in
    the same way when the run goes on; one that comes later waits for the step to be done and saved.

    Args:
        evaluation: Held-out prompts; None evaluates nothing.
        precision: ``float32`` or ``bfloat16``; decides how far sampler and learner may disagree.
        peak_flops_per_s: Operations a second that the devices of all ranks do at most; None if that is not known.
        interruption: What signals do.
        watchdog: Watches every step, evaluation and checkpoint.
        profiler: Records some steps; None records none.

    Attributes:
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
        peak_flops_per_s: float | None = None,
        interruption: Interruption,
        watchdog: Watchdog,
        profiler: Profiler | None = None,
    ) -> None:
        self._config, self._algorithm, self._engine = config, algorithm, engine
        self._encoder, self._collector = encoder, collector
        self._evaluation = evaluation
        self._recorder, self._interruption, self._watchdog = recorder, interruption, watchdog
        self._updater = Updater(config, algorithm, collector.batch, recorder, interruption)
        self._agreement = LogprobCheck(precision, config.trainer.on_mismatch, event=recorder.event)
        self._profiler = profiler or Profiler(engine, Path(), 0, 0, print)
        self._peak_flops_per_s = peak_flops_per_s
        make = self._demonstrate if algorithm.source == "demonstrations" else encoder.encode
        self._prompts: PromptPrefetcher[Any] = PromptPrefetcher(train, train.order(config.trainer.seed), make)
        self._held_out: Sequence[EncodedPrompt] | None = None
        self.carried_groups: list[ScoredGroup] = []
        self._saved: int | None = None
        self._is_checked = False
        self._stop_condition = config.trainer.stop_condition
        self._has_warned = False

    def fit(
        self, done: int | None = None, pending: Mapping[str, float] | None = None, *, is_saved: bool = True
    ) -> None:
        """Train up to step ``trainer.steps``, or to one whose metrics fulfil ``trainer.stop_when``.

        Args:
            done: The step of the checkpoint that engine and trainer were restored from; None for a new run.
            pending: What that step came to, if it has not been evaluated and logged; None if it has.
            is_saved: Whether that checkpoint is one of this run.

        Raises:
            MMRLError: A plugin fails, or the numbers do not agree.
            Stopped: A signal came; there is a checkpoint, unless a ResourceError tells that it cannot be written.
        """
        self._saved = done if is_saved else None
        with self._interruption.deferred(), self._preparing():
            if done is None:
                done, pending = 0, {}
                seed_generators(self._config.trainer.seed)
                self._save(0, {}, self.state(), needed=False)
            elif not is_saved:
                self._save(done, pending or {}, self.state(), needed=True)
            if pending is not None and self._is_enough(done, self._conclude(done, pending)):
                return
            for step in range(done + 1, self._config.trainer.steps + 1):
                if self._is_enough(step, self._step(step)):
                    return

    @property
    def consumed_prompts(self) -> int:
        """Prompts taken from the data order so far: the position of the next one."""
        return self._prompts.position

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs besides weights and optimizer, as JSON can hold it."""
        return {
            "generators": generators(),
            "consumed_prompts": self.consumed_prompts,
            "updates": self._updater.updates,
            "faults_in_a_row": self._updater.faults_in_a_row,
            "carried_groups": group_records(self.carried_groups),
            "algorithm": self._algorithm_state(),
        }

    def restore(self, state: Mapping[str, Any], media: Path) -> None:
        """Go on where ``state`` was asked.

        Args:
            media: Where the images of carried groups are.
        """
        set_generators(state["generators"])
        self._prompts.go_to(int(state["consumed_prompts"]))
        self._updater.updates = int(state["updates"])
        self._updater.faults_in_a_row = int(state["faults_in_a_row"])
        self.carried_groups = read_groups(state["carried_groups"], media)
        if state["algorithm"]:
            with plugin_errors(self._algorithm, "restore"):
                self._algorithm.restore(state["algorithm"])

    def _algorithm_state(self) -> dict[str, Any]:
        """A copy, as the next step may change it."""
        with plugin_errors(self._algorithm, "state"):
            state: dict[str, Any] = json.loads(json.dumps(dict(self._algorithm.state())))
        return state

    def _step(self, step: int) -> Mapping[str, float]:
        """A step, its checkpoint and its evaluation; returns its metrics."""
        before, config = self.state(), self._config.trainer
        try:
            with self._profiler.step(step), self._watchdog.watch(f"step {step}"):
                values = self.train_step(step)
        except Stopped:  # no optimizer step was taken: the one before is where the run goes on
            if self._saved != step - 1:
                self._save(step - 1, {}, before, needed=True)
            raise
        needed = step == config.steps or self._interruption.stopped is not None
        if needed or config.saves(step):  # before the evaluation: whatever fails there, they are kept
            start = time.perf_counter()
            try:
                self._save(step, values, self.state(), needed=needed)
            except BaseException:
                self._recorder.log(step, values)
                raise
            values["perf/save_s"] = time.perf_counter() - start
        everything = self._conclude(step, values)
        self._interruption.check()
        return everything

    def _is_enough(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether a step that is logged fulfils ``trainer.stop_when``; then it has a checkpoint."""
        condition = self._stop_condition
        if condition is None:
            return False
        if not condition.holds(values):
            is_evaluated = any(name.startswith("eval/") for name in values)
            is_due = is_evaluated if condition.metric.startswith("eval/") else step > 0
            if is_due and condition.metric not in values:
                self._warn_of_stop(condition.metric, values)
            return False
        if self._saved != step:
            self._save(step, values, self.state(), needed=True)
        message = f"{condition.told(values)}: the run ends after step {step} of {self._config.trainer.steps}"
        self._recorder.event("stop_when", message=message, step=step)
        return True

    def _warn_of_stop(self, metric: str, values: Mapping[str, float]) -> None:
        """Once: the metric that is waited for is not there."""
        if not self._has_warned:
            self._has_warned = True
            hint = suggestion(metric, values)
            message = f"trainer.stop_when: {metric} is in no step so far, so nothing ends the run early"
            self._recorder.event("warning", message="; ".join(filter(None, [message, hint])))

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

    def _conclude(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate a finished step if that is due, and log it; returns all of its metrics."""
        is_due = self._evaluation is not None and self._config.trainer.evaluates(step)
        found = dict[str, float]()
        try:
            if is_due:
                start = time.perf_counter()
                with self._watchdog.watch(f"the evaluation of step {step}"), self._interruption.immediate():
                    found = self._evaluate()
                found["perf/eval_s"] = time.perf_counter() - start
        except Stopped:  # the run goes on with this evaluation
            if self._saved != step:
                self._save(step, values, self.state(), needed=True)
            raise
        except BaseException:  # the step is done, whatever happens to its evaluation
            self._recorder.log(step, values)
            raise
        values = {**values, **found}
        self._recorder.log(step, values)
        return values

    def train_step(self, step: int) -> dict[str, float]:
        """Sample, score, assign credit, update; returns the step's metrics."""
        clock, state = Clock(self._profiler.span), self._algorithm_state()
        with self._interruption.immediate():
            experience, lesson = self._collect(step, clock), Lesson()
        self._interruption.check()
        if step < self._config.trainer.steps:
            self._prompts.prepare(self._config.trainer.prompts_per_step - len(self.carried_groups))
        try:
            if not self._is_checked:
                has_sampler = experience.collected is not None
                with clock.phase("check"):
                    self._agreement.check_first(experience.sampled, self._engine, has_sampler=has_sampler)
                self._is_checked = True
            if experience.samples:
                with self._engine.learning() as learner:
                    lesson = self._updater.learn(step, experience, learner, clock)
        finally:  # what was sampled is on disk before its numbers can stop the run
            if experience.collected is not None:
                with clock.phase("record"):
                    self._recorder.rollouts(step, _all_groups(experience.collected, lesson.groups), state)
        values = {**lesson.metrics, **self._describe(step, experience)}
        values |= self._agreement.check_step(step, lesson.groups)
        if values.get("advantage/abs_mean") == 0:
            self._recorder.event("no_signal", message=f"step {step} taught nothing: every advantage is 0", step=step)
        values |= clock.metrics(sum(sample.num_tokens for sample in experience.sampled), self._peak_flops_per_s)
        with plugin_errors(self._algorithm, "observe"):
            return values | dict(self._algorithm.observe(dict(values)))

    def _evaluate(self) -> dict[str, float]:
        if self._evaluation is None:
            return {}
        prompts = self._held_out
        if prompts is None:
            self._prompts.wait()  # both may read from one file
            prompts = self._evaluation.each(self._encoder.encode)
            self._held_out = prompts if len(prompts) <= MAX_HELD_OUT else None
        return dict(self._collector.evaluate(prompts).metrics)

    def _collect(self, step: int, clock: Clock) -> Experience:
        count = self._config.trainer.prompts_per_step
        if self._algorithm.source == "demonstrations":
            with clock.phase("prompts"):
                drawn = self._prompts.draw(count)
            return Experience([replace(s, prompt=replace(s.prompt, epoch=epoch)) for epoch, s in drawn])
        carried, self.carried_groups = self.carried_groups, []
        wanted = count - len(carried)
        try:
            found = self._collector.training_groups(self._algorithm, self._prompts.draw, wanted, clock)
        except MMRLError:  # such as too many failures of rewards
            if lost := self._collector.generated:
                unscored = [_not_trained_on(_unscored(group), False, (0, place)) for place, group in enumerate(lost)]
                self._recorder.rollouts(step, unscored, self._algorithm_state())
            raise
        groups = [*carried, *found.kept_groups]
        if len(groups) < count:
            groups = self._starve(step, groups, found)
        return Experience.of_groups(groups, found)

    def _demonstrate(self, prompt: Prompt) -> Sample:
        return self._encoder.demonstrate(self._encoder.encode(prompt))

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Prompts may be prepared in this block, and not after it."""
        try:
            yield
        finally:
            with self._watchdog.watch("the prompts that were prepared"):
                self._prompts.stop()

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
            self._recorder.rollouts(step, _all_groups(found, ()), self._algorithm_state())
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

    def _describe(self, step: int, experience: Experience) -> dict[str, float]:
        """Metrics of all that was sampled."""
        found = experience.collected
        if found is None:
            masks = [sample.mask for sample in experience.samples]
            return metrics.length_metrics(masks, np.zeros(len(masks), bool))
        batch = self._collector.batch(found.groups)
        if not batch.valid.any():
            self._recorder.event("unscored", message=f"no rollout of step {step} could be scored")
        refills = self._algorithm.needs().refill is not None
        return collected_metrics(found, batch, self._collector.accuracy_of, refills=refills)


def _all_groups(found: Collected, trained: Sequence[CreditedGroup]) -> list[CreditedGroup]:
    """The groups that were trained on, and then the others that were sampled in the step."""
    places = {id(group): place for group, place in zip(found.groups, found.places, strict=True)}
    others = [
        _not_trained_on(group, kept, places[id(group)])
        for group, kept in zip(found.groups, found.kept, strict=True)
        if not (trained and kept)
    ]
    return [*(replace(group, place=places.get(id(group.scored))) for group in trained), *others]


def _not_trained_on(group: ScoredGroup, kept: bool, place: tuple[int, int]) -> CreditedGroup:
    rollouts = group.group.rollouts
    zeros = [np.zeros(len(rollout.token_ids)) for rollout in rollouts]
    return CreditedGroup(group, kept, zeros, [np.zeros(0, np.float32)] * len(rollouts), place=place)


def _unscored(group: RolloutGroup) -> ScoredGroup:
    count = len(group.rollouts)
    return ScoredGroup(group, np.zeros(count), np.zeros(count, np.bool_), {})
