"""The loop: sample, score, assign credit, update; it knows no algorithm, no engine and no file format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.config.problems import suggestion
from mmrl.config.sections import Config
from mmrl.data.prompts import PromptSource
from mmrl.engine_api import Engine, Learner, PromptEncoder
from mmrl.errors import (
    DeviceBusyError,
    DeviceMemoryError,
    NumericsError,
    RankLostError,
    ResourceError,
    SamplersRestarted,
    plugin_errors,
)
from mmrl.interfaces import Alarm, Algorithm
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.collector import Collector, judge_of, step_metrics
from mmrl.step.adapter_notice import AdapterNotice
from mmrl.step.check import LogprobCheck
from mmrl.step.context import Recorder as Recorder
from mmrl.step.context import RunContext as RunContext
from mmrl.step.evaluate import ComparisonEvaluator, Evaluator
from mmrl.step.forward import Judged, judged
from mmrl.step.gather import SOURCES, state_of, step_groups
from mmrl.step.lag import StepLag
from mmrl.step.learn import LearnSettings, StepResult, Update, finished, learn
from mmrl.step.queue import StepQueue
from mmrl.step.slots import Kept
from mmrl.step.sync_probe import SyncProbe
from mmrl.step.updates import UpdateLog
from mmrl.system.clock import Clock
from mmrl.system.freed_memory import FreedMemory
from mmrl.system.rng_state import generators, seed_generators, set_generators
from mmrl.system.signals import Stopped
from mmrl.types import Batch, ScoredGroup


class Trainer:
    """Runs an algorithm.

    A step is done whole or not at all. A signal before its first optimizer step discards the samples; they are sampled
    again in the same way when the run goes on. A later signal waits until the step is done and saved.

    Args:
        evaluations: Held-out prompts of each evaluation set, by its name; none evaluates nothing.
        precision: ``float32`` or ``bfloat16``; decides how far sampler and learner may disagree.
        peak_flops_per_s: Operations a second that the devices of all ranks do at most; None if that is not known.
        probe: Compares sampler and learner where the sampler is behind; None where it is not.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        engine: Engine,
        encoder: PromptEncoder,
        collector: Collector,
        train: PromptSource,
        evaluations: Mapping[str, PromptSource],
        context: RunContext,
        *,
        precision: str,
        peak_flops_per_s: float | None = None,
        probe: SyncProbe | None = None,
    ) -> None:
        self._config, self._algorithm, self._engine = config, algorithm, engine
        self._encoder, self._collector = encoder, collector
        self._run, self._recorder = context, context.recorder
        strategy = SOURCES[algorithm.source]
        evaluated_by = (config, evaluations, encoder, collector, context.recorder)
        self._evaluator: Evaluator | None = None
        if evaluations and strategy.evaluates_given(config):
            group = partial(strategy.group, needs=algorithm.needs(), encoder=encoder)
            self._evaluator = ComparisonEvaluator(*evaluated_by, self._compare, group)
        elif evaluations:
            self._evaluator = Evaluator(*evaluated_by)
        source = strategy(config, algorithm, encoder, collector, context.recorder.event)
        self._queue = StepQueue(config.trainer, source, train, context.may_restart)
        self._updates = UpdateLog(context.recorder)
        self._check = LogprobCheck(precision, config.trainer.on_mismatch, event=context.recorder.event)
        self._notice = AdapterNotice(precision, context.recorder.event)
        self._peak_flops_per_s = peak_flops_per_s
        self._probe = collector.probe = probe
        self._done = 0
        self._saved: int | None = None
        self._is_checked = False
        self._stop_condition = config.trainer.stop_condition
        self._has_warned = False
        self._alarms: Sequence[Alarm] = ()
        self._freed = FreedMemory()

    def fit(
        self, done: int | None = None, pending: Mapping[str, float] | None = None, *, is_saved: bool = True
    ) -> None:
        """Train up to step ``trainer.steps``, or to one whose metrics fulfil ``trainer.stop_when``.

        Args:
            done: The step of the checkpoint that engine and trainer were restored from; None for a new run.
            pending: The step's metrics, if it has not been evaluated and logged; None if it has.
            is_saved: True if that checkpoint is one of this run.

        Raises:
            MMRLError: A plugin fails, or the numbers do not agree.
            Stopped: A signal came; there is a checkpoint, unless a ResourceError tells that it cannot be written.
        """
        self._saved = done if is_saved else None
        with self._run.interruption.deferred(), ExitStack() as at_end:
            at_end.callback(self._stop_preparing)
            at_end.callback(self._wait_for_rollouts)
            self._done = done or 0
            if done is None:
                done = 0
                seed_generators(self._config.trainer.seed)
                pending = self._saved_in(0, {}, needed=False)
            elif not is_saved:
                self._save(done, pending or {}, self.state(), needed=True)
            if pending is not None:
                values = self._conclude(done, pending)
                self._heed_alarms(done, values)
                if self._is_enough(done, values):
                    return
            for step in range(done + 1, self._config.trainer.steps + 1):
                if self._is_enough(step, self._step(step)):
                    return

    @property
    def consumed_prompts(self) -> int:
        """Prompts taken from the data order so far: the position of the next one."""
        return self._queue.consumed_prompts

    def state(self) -> dict[str, Any]:
        """All that ``restore`` needs besides weights and optimizer, as JSON can hold it."""
        return self._with_batches(self._own_state())

    def _own_state(self) -> dict[str, Any]:
        """The state without the queue's."""
        return {
            "generators": generators(),
            "updates": self._updates.updates,
            "faults_in_a_row": dict(self._updates.faults_in_a_row),
            "algorithm": state_of(self._algorithm),
        }

    def _with_batches(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """A state with that of the queue after the last whole step; waits until the batches in it are sampled."""
        if not self._queue.is_there(self._done):
            last = self._queue.last_kept(self._done)
            self._recorder.event("waiting", message=f"batch {last}, which the checkpoint holds, is still being sampled")
        kept = self._queue.keep(self._done)
        return {
            "generators": own["generators"],
            "consumed_prompts": kept.place.position,
            "updates": own["updates"],
            "faults_in_a_row": own["faults_in_a_row"],
            **kept.place.left.state(),
            "algorithm": own["algorithm"],
            **kept.rest(),
            **({} if self._probe is None else {"probe": self._probe.state()}),
        }

    def restore(self, state: Mapping[str, Any], media: Path, step: int) -> None:
        """Go on from an answer of ``state``, which was given after a step.

        Args:
            media: The folder of the images of groups that it holds.
        """
        set_generators(state["generators"])
        self._queue.restore(Kept.of(state, media), step)
        if self._probe is not None:
            self._probe.restore(state.get("probe", ()))
        self._updates.updates = int(state["updates"])
        faults = state["faults_in_a_row"]  # a number in checkpoints of runs before there were critics
        self._updates.faults_in_a_row = dict(faults) if isinstance(faults, dict) else {self._algorithm.network: faults}
        if state["algorithm"]:
            with plugin_errors(self._algorithm, "restore"):
                self._algorithm.restore(state["algorithm"])

    def _compare(self, groups: Sequence[ScoredGroup]) -> Judged:
        """The judgement of the algorithm's loss on groups that the dataset gives."""
        settings = LearnSettings(max_tokens=self._config.sampler.max_new_tokens)
        with self._engine.learning() as learner:
            return judged(groups, self._algorithm, learner, settings)

    def _step(self, step: int) -> Mapping[str, float]:
        """A step, its checkpoint and its evaluation; returns its metrics."""
        before, config = self._own_state(), self._config.trainer
        try:
            with self._run.profiler.step(step), self._run.watchdog.watch(f"step {step}"):
                values = self.train_step(step)
                self._reset_reference(step)
        except Stopped:  # no optimizer step was taken: the one before is where the run goes on
            if self._saved != step - 1:
                self._save(step - 1, {}, self._with_batches(before), needed=True)
            raise
        needed = step == config.steps or self._run.interruption.stopped is not None
        saves = needed or (config.saves(step) and self._can_keep())
        if saves:  # before the evaluation, which may fail: the weights are kept
            try:
                values |= self._saved_in(step, values, needed=needed)
            except BaseException:
                if self._is_evaluated(step):  # the monitors see it with its evaluation, when the run goes on
                    self._recorder.log(step, values)
                else:
                    self._log(step, values)
                raise
        everything = self._conclude(step, values)
        if self._run.interruption.stopped is not None and self._saved != step:  # a signal came since a save was due
            self._save(step, values, self.state(), needed=True)
        self._run.interruption.check()
        self._heed_alarms(step, everything)
        self._freed.give_back()
        return everything

    def _can_keep(self) -> bool:
        """True if a checkpoint of the last whole step can be written; a batch that fails ends the run at its step."""
        with self._run.watchdog.watch("the sampling of the batches that a checkpoint holds"):
            return self._queue.can_keep(self._done)

    def _is_enough(self, step: int, values: Mapping[str, float]) -> bool:
        """True if a step that is logged fulfils ``trainer.stop_when``; the step then gets a checkpoint."""
        condition = self._stop_condition
        if condition is None:
            return False
        if not condition.holds(values):
            section = condition.metric.partition("/")[0]
            is_evaluated = any(name.startswith(f"{section}/") for name in values)
            is_due = is_evaluated if section in ("eval", "eval_blank") else step > 0
            if is_due and condition.metric not in values:
                self._warn_of_stop(condition.metric, values)
            return False
        if self._saved != step:
            self._save(step, values, self.state(), needed=True)
        message = f"{condition.told(values)}: the run ends after step {step} of {self._config.trainer.steps}"
        self._recorder.event("stop_when", message=message, step=step)
        return True

    def _warn_of_stop(self, metric: str, values: Mapping[str, float]) -> None:
        """Warn once that the metric of ``trainer.stop_when`` is not there."""
        if not self._has_warned:
            self._has_warned = True
            hint = suggestion(metric, values)
            message = f"trainer.stop_when: {metric} is in no step so far, so nothing ends the run early"
            self._recorder.event("warning", message="; ".join(filter(None, [message, hint])))

    def _saved_in(self, step: int, values: Mapping[str, float], *, needed: bool) -> dict[str, float]:
        """Write a checkpoint of the state as it is now; returns ``perf/save_s``."""
        start = time.perf_counter()
        self._save(step, values, self.state(), needed=needed)
        return {"perf/save_s": time.perf_counter() - start}

    def _save(self, step: int, values: Mapping[str, float], state: Mapping[str, Any], *, needed: bool) -> None:
        """Write a checkpoint; one that is not ``needed`` may fail, if only for want of room."""
        self._wait_for_rollouts()
        try:
            with self._run.watchdog.watch(f"the checkpoint of step {step}"), self._engine.learning() as learner:
                self._recorder.save(learner, step, values, state)
            self._saved = step
        except (RankLostError, DeviceBusyError, DeviceMemoryError):  # ranks may wait for each other
            raise
        except ResourceError as error:
            self._recorder.event("checkpoint_failed", message=str(error), step=step)
            if needed:
                raise

    def _conclude(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate a finished step if that is due, and log it; returns all of its metrics."""
        found = dict[str, float]()
        try:
            if self._evaluator is not None and self._is_evaluated(step):
                start = time.perf_counter()
                with self._run.watchdog.watch(f"the evaluation of step {step}"), self._run.interruption.immediate():
                    if self._evaluator.reads or self._queue.schedule.lag:
                        self._queue.settle()  # both may read from one file, and use one sampler
                    found = self._evaluated(self._evaluator, step)
                found["perf/eval_s"] = time.perf_counter() - start
                self._wait_for_rollouts()  # its metrics say that its groups are there
        except Stopped:  # the run goes on with this evaluation
            if self._saved != step:
                self._save(step, values, self.state(), needed=True)
            raise
        except BaseException:  # the step is done, whatever happens to its evaluation
            self._recorder.log(step, values)
            raise
        return self._log(step, {**values, **found})

    def _evaluated(self, evaluator: Evaluator, step: int) -> dict[str, float]:
        """The evaluation of a step; from its beginning, if the sampler was lost meanwhile."""
        while True:
            try:
                return evaluator.evaluate(step)
            except SamplersRestarted as error:
                if not self._run.may_restart(error):
                    raise

    def _is_evaluated(self, step: int) -> bool:
        """True if an evaluation is due after a step."""
        return self._evaluator is not None and self._config.trainer.evaluates(step)

    def _log(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Show a finished step to the monitors, and log it; returns all of its metrics."""
        seen = self._recorder.look(step, values)
        self._alarms, values = seen.alarms, {**values, **seen.metrics}
        self._recorder.log(step, values)
        return values

    def _heed_alarms(self, step: int, values: Mapping[str, float]) -> None:
        """End the run at an alarm, if ``trainer.on_alarm`` says so; the step then gets a checkpoint.

        Raises:
            NumericsError: There is one.
        """
        if not self._alarms or self._config.trainer.on_alarm != "stop":
            return
        if self._saved != step:
            self._save(step, values, self.state(), needed=True)
        told = "; ".join(f"{alarm.monitor}: {alarm.message}" for alarm in self._alarms)
        raise NumericsError(
            f"the run ends after step {step}, which has a checkpoint: {told}",
            where="trainer.on_alarm: stop",
            remedy="the same command goes on from there; trainer.on_alarm: warn ends no run",
        )

    def train_step(self, step: int) -> dict[str, float]:
        """Sample, score, assign credit, update; returns the step's metrics."""
        clock, state, result = Clock(self._run.profiler.span), state_of(self._algorithm), StepResult()
        lag = StepLag(self._config, self._engine, self._queue, step, clock, self._probe)
        with self._run.interruption.immediate():
            found = lag.take()
        self._run.interruption.check()
        self._queue.prepare(step)
        try:
            if found.fault is not None:
                raise found.fault
            if not self._is_checked:
                with clock.phase("check"):
                    args = found.own_rollouts, self._engine, self._algorithm.network, lag.version
                    self._is_checked = self._check.check_first(*args)
            lag.check(found, self._check)
            batch, needs = self._collector.batch(found.groups), self._algorithm.needs()
            judge = judge_of(self._config, needs, batch)
            measured = step_metrics(found, batch, judge, refills=needs.refill is not None)
            if found.learned:
                with self._engine.learning() as learner:
                    result = self._learn(found, batch if found.learns_all else None, learner, clock)
        finally:  # groups are recorded before their numbers can stop the run
            with clock.phase("record"):
                self._recorder.rollouts(step, step_groups(found, result.groups), state)
        compared = self._check.check_step(step, result.groups, lag.version)
        values = {**result.metrics, **measured, **self._queue.left_out, **compared}
        if not found.is_given and values.get("advantage/abs_mean") == 0:
            self._recorder.event("no_signal", message=f"step {step} taught nothing: every advantage is 0", step=step)
        self._notice.look(step, values)
        values |= clock.metrics(sum(rollout.num_tokens for rollout in found.rollouts), self._peak_flops_per_s)
        values |= lag.metrics(found.learned, values["perf/step_s"])
        self._done = step
        with plugin_errors(self._algorithm, "observe"):
            return values | dict(self._algorithm.observe(dict(values)))

    def _learn(self, found: SampledStep, batch: Batch | None, learner: Learner, clock: Clock) -> StepResult:
        """Learn from the step's groups, and record each optimizer step.

        Args:
            batch: Their rollouts, if they are known as one.

        Raises:
            NumericsError: Too many optimizer steps in a row came to nothing.
            PluginError: The algorithm fails.
            Stopped: A signal came before the first optimizer step; none was taken.
        """
        settings = LearnSettings.of(self._config, self._collector.penalties, found.step)

        def note(update: Update) -> None:
            if update.phase == "credit":
                self._run.interruption.check()
            elif update.phase == "update":
                self._updates.note(found.step, update, settings.num_updates)

        return finished(learn(found.learned, self._algorithm, learner, settings, batch=batch), note, clock)

    def _reset_reference(self, step: int) -> None:
        """Make the reference the policy that a step has left, if that is due; before the step's checkpoint."""
        if self._config.reference.resets(step):
            with self._engine.learning() as learner:
                learner.reset_reference()

    def _wait_for_rollouts(self) -> None:
        with self._run.watchdog.watch("the record of rollouts"):
            self._recorder.wait_for_rollouts()

    def _stop_preparing(self) -> None:
        with self._run.watchdog.watch("the prompts that were prepared"):
            self._queue.stop()
