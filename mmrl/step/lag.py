"""One step of a run whose sampler may be behind its learner: versions of weights, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Engine
from mmrl.rollout.batch import SampledStep, own_rollouts_of
from mmrl.step.check import LogprobCheck
from mmrl.step.queue import StepQueue
from mmrl.step.sync_probe import SyncProbe
from mmrl.system.clock import Clock
from mmrl.types import IntArray, ScoredGroup


class StepLag:
    """Begins a step: with a lag, the slot of a later batch is opened with the weights that there are now.

    Where the same ranks sample whole rollouts and learn, in turns, it does and measures nothing; unless the batch is
    from a checkpoint of a run with a lag, which may go on without one.

    Args:
        probe: Asked by the learner before the weights are sampled with; None asks nothing.

    Attributes:
        version: That of the learner's weights at the step's begin; None where nothing else is sampled with.
    """

    def __init__(
        self, config: Config, engine: Engine, queue: StepQueue, step: int, clock: Clock, probe: SyncProbe | None
    ) -> None:
        self._queue, self._step, self._clock, self._is_split = queue, step, clock, config.cluster.is_split
        self._probe, self._is_partial = probe, config.sampler.partial is not None
        self._taken_s, self._idle_s = 0.0, queue.idle_s
        self._is_ahead = queue.schedule.lag > 0 or queue.holds(step)
        self.version: int | None = None
        if self._is_split or self._is_partial or self._is_ahead:
            with clock.phase("publish" if self._is_split else "sync"):
                self.version = engine.publish()
        if probe is not None and self.version is not None:
            with clock.phase("check"), engine.learning() as learner:
                probe.ask_learner(learner, self.version)
        if queue.schedule.lag:
            assert self.version is not None, "ranks of their own sample where there is a lag"
            queue.open(step, self.version)

    def take(self) -> SampledStep:
        """The step's batch; see ``StepQueue.take``."""
        begin = time.perf_counter()
        found = self._queue.take(self._step, self._clock)
        self._taken_s = time.perf_counter() - begin
        return found

    def check(self, found: SampledStep, check: LogprobCheck) -> None:
        """Judge the weights that the step was sampled with, by their version and by the probe. A batch of a checkpoint
        has the probe's metrics alone.

        Raises:
            NumericsError: Sampler and learner disagree, or other weights have sampled the step.
        """
        version = self._queue.version_of(self._step) if self._is_ahead else self.version
        if version is None:
            return
        check.check_version(self._step, found.own_rollouts, version, is_whole=not self._is_partial)
        compared = None if self._probe is None else self._probe.compared(version)
        if compared is not None:
            check.check_probe(self._step, compared)

    def metrics(self, learned: Sequence[ScoredGroup], step_s: float) -> dict[str, float]:
        """``staleness/*`` of the groups that the step learned from, and the shares of its seconds that were waited."""
        if self.version is None:
            return {}
        values = staleness(learned, self.version)
        if self._is_split:
            idle_s = self._queue.idle_s - self._idle_s if self._queue.schedule.lag else step_s - self._taken_s
            values["perf/idle_sampler_fraction"] = min(max(idle_s / step_s, 0.0), 1.0)
            values["perf/idle_learner_fraction"] = min(self._taken_s / step_s, 1.0)
        return values


def staleness(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Mean and largest number of optimizer steps between the weights of each token of the policy and a version."""
    behind_T = version - _versions(groups)
    if not len(behind_T):
        return {}
    return {"staleness/mean": float(behind_T.mean()), "staleness/max": float(behind_T.max())}


def learners_version(groups: Sequence[ScoredGroup], metrics: Mapping[str, float | None]) -> int | None:
    """The version of the learner's weights at the begin of a step that learned from these groups.

    Args:
        metrics: The step's; without ``staleness/max`` it is that of all tokens, and None here.
    """
    versions_T, behind = _versions(groups), metrics.get("staleness/max")
    return None if behind is None or not len(versions_T) else int(versions_T.min()) + int(behind)


def _versions(groups: Sequence[ScoredGroup]) -> IntArray:
    """(T,) the versions that sampled the tokens of the policy."""
    found = [rollout.version_of_token[rollout.mask] for rollout in own_rollouts_of(groups)]
    return np.concatenate([np.zeros(0, np.int64), *found])
