"""Trackers beside the run: each has a thread and a bounded queue, so none can stop or slow a step."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmrl.errors import plural
from mmrl.interfaces import ShownRollout, Tracker
from mmrl.system.redaction import Redactor
from mmrl.types import IMAGE_PLACEHOLDER, CreditedGroup, FloatArray, Message, ScoredGroup

QUEUE_STEPS = 1000
"""Steps that may wait for a slow tracker; further ones are dropped and counted."""

_Call = Callable[[Tracker], None]


class Shown(NamedTuple):
    """An evaluation as trackers show it: the arguments of ``Tracker.evaluation``."""

    rollouts: Sequence[ShownRollout]
    histograms: Mapping[str, FloatArray]


def shown(evaluated: Mapping[str, Sequence[CreditedGroup]], sampled: Sequence[CreditedGroup], count: int) -> Shown:
    """An evaluation as trackers show it, without secrets.

    Args:
        evaluated: Its groups, by the name of their set.
        sampled: The groups of the step before it.
        count: Rollouts of each set to show.
    """
    redact, histograms = Redactor(), dict[str, FloatArray]()
    sections = {f"eval/{name}" if name else "eval": groups for name, groups in evaluated.items()}
    for name, groups in {**sections, "rollouts": sampled}.items():
        rewards = [group.scored.rewards[group.scored.valid] for group in groups]
        if groups:
            histograms[f"{name}/reward"] = np.concatenate(rewards)
            lengths = [np.count_nonzero(rollout.mask) for group in groups for rollout in group.scored.rollouts]
            histograms[f"{name}/length"] = np.array(lengths, np.float64)
    firsts = [group for groups in evaluated.values() for group in groups[:count]]
    return Shown([_shown(group.scored, redact) for group in firsts], histograms)


def _shown(scored: ScoredGroup, redact: Redactor) -> ShownRollout:
    """A group's first rollout."""
    rollout = scored.rollouts[0]
    messages, num_read = [*rollout.messages], sum(not segment.by_policy for segment in rollout.segments)
    for index, played in enumerate(rollout.episode):
        messages.append(Message("assistant", played.turn.text))
        if index < num_read and played.content is not None:
            texts = (part if isinstance(part, str) else IMAGE_PLACEHOLDER for part in played.content)
            messages.append(Message(played.role, "".join(texts)))
    if not rollout.episode:
        messages.append(Message("assistant", rollout.text))
    return ShownRollout(
        tuple(Message(each.role, redact(each.content)) for each in messages),
        rollout.all_images,
        "" if rollout.answer is None else redact(str(rollout.answer)),
        float(scored.rewards[0]) if scored.valid[0] else math.nan,
    )


class Trackers:
    """Sends the run's metrics to every tracker.

    Args:
        on_fault: Called, from the trackers' threads, with each tracker's first fault and first dropped step, and in
            ``finish`` with the missing steps.
    """

    def __init__(self, trackers: Sequence[Tracker], on_fault: Callable[[str], None]) -> None:
        self._threads = [_TrackerThread(tracker, on_fault) for tracker in trackers]

    def start(
        self, run_dir: Path, config: Mapping[str, Any], states: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Open every tracker, without waiting for any; they get the config without secrets.

        Args:
            states: The answer of ``states`` in the run that goes on.
        """
        public = Redactor().plain(config)
        for thread, state in zip(self._threads, states or [{}] * len(self._threads), strict=False):
            thread.start(run_dir, public, state)

    def states(self) -> list[Mapping[str, Any]]:
        """Each tracker's last known state, to go on in the same place."""
        return [thread.state for thread in self._threads]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step, without waiting for any tracker."""
        values = dict(metrics)
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log(step, values))

    def alarm(self, step: int, monitor: str, message: str) -> None:
        """Show an alarm, without waiting for any tracker."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.alarm(step, monitor, message))

    def evaluation(self, step: int, shown: Shown) -> None:
        """Show an evaluation, without waiting for any tracker."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.evaluation(step, shown.rollouts, shown.histograms))

    def finish(self, timeout_s: float = 30.0) -> None:
        """Let the trackers flush and close, for ``timeout_s`` seconds together at most."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.report(deadline)


class _TrackerThread:
    """Calls one tracker in order; after a failed ``start`` it calls it no more."""

    def __init__(self, tracker: Tracker, on_fault: Callable[[str], None]) -> None:
        self._tracker, self._on_fault = tracker, on_fault
        self._name = type(tracker).__name__
        self._queue: queue.SimpleQueue[tuple[_Call, bool] | None] = queue.SimpleQueue()
        self._num_faults = self._num_dropped = 0
        self.state: Mapping[str, Any] = {}
        self._is_usable = True
        self._thread = threading.Thread(target=self._run, name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def start(self, run_dir: Path, config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        def begin(tracker: Tracker) -> None:
            if state:
                tracker.restore(state)
            tracker.start(run_dir, config)
            self.state = json.loads(json.dumps(dict(tracker.state())))  # a state that JSON cannot hold is a fault now

        self.state = state
        self.call(begin, is_start=True)

    def call(self, call: _Call, is_start: bool = False) -> None:
        if self._queue.qsize() < QUEUE_STEPS:
            self._queue.put((call, is_start))
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._on_fault(f"tracker {self._name} is too slow: {QUEUE_STEPS} steps wait; further ones are dropped")

    def close(self) -> None:
        self._queue.put(None)

    def report(self, deadline: float) -> None:
        """Wait for the thread until the deadline, then report the steps that are missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._on_fault(
                f"tracker {self._name} did not finish in time: about {plural(self._queue.qsize(), 'call')} not made"
            )
        if self._num_faults > 1 or self._num_dropped:
            missing = f"{plural(self._num_faults, 'fault')}, {plural(self._num_dropped, 'step')} dropped"
            self._on_fault(f"tracker {self._name}: {missing}")

    def _run(self) -> None:
        while item := self._queue.get():
            call, is_start = item
            if not self._try(call) and is_start:
                self._is_usable = False
        self._try(lambda tracker: tracker.finish())

    def _try(self, call: _Call) -> bool:
        """True if the call went well. SystemExit counts as a fault too: some trackers exit when they cannot log in."""
        if not self._is_usable:
            return False
        try:
            call(self._tracker)
        except BaseException as error:
            self._num_faults += 1
            if self._num_faults == 1:
                self._on_fault(f"tracker {self._name} failed: {type(error).__name__}: {error}")
            return False
        return True
