"""Worker processes that share a queue of rollouts to score: each may hang, crash or grow, and is then replaced.

A worker (``mmrl.rollout.rewards.worker``) is a process with an environment without the user's secrets. One thread here
drives one worker, and each future carries its own rollouts, so nothing depends on which worker is free first.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType

from mmrl.config.plugin_specs import RewardSpec
from mmrl.rollout.rewards.failures import Failure, Failures, RewardError, reward_error
from mmrl.system.worker_process import Reply, WorkerProcess, WorkerProcessEnded, public_variables
from mmrl.types import Rollout

START_TIMEOUT_S = 600.0
"""For a worker to import, make and prepare its rewards, which may load a model; a reward's deadline begins later."""
MAX_GROWTH_BYTES = 2**30
"""Resident memory that a worker may gain after its first call before another takes its place."""
_SIDE_BY_SIDE_GRACE_S = 2.0
"""Beyond the deadline that a worker itself sets to each of the rollouts that it scores side by side."""
_STOP_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RewardScores:
    """One reward's scores of some rollouts, in order.

    Attributes:
        scores: None for what could not be scored.
        seconds: The time that each took; rollouts that are scored together share theirs.
        answers: Each completion's answer; None if the reward reads no answers.
        parts: Each rollout's further values by name; empty if the reward answers a number alone.
        spans: (start, end, value) of parts of each rollout's text; empty if the reward values none.
    """

    scores: Sequence[float | None]
    seconds: Sequence[float]
    answers: Sequence[str | None] | None = None
    parts: Sequence[Mapping[str, float | None]] = ()
    spans: Sequence[Sequence[tuple[int, int, float]]] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """Rollouts of one prompt, the rewards that are to score them, and their scores so far."""

    rollouts: Sequence[Rollout]
    rewards: frozenset[int]
    failures: Failures
    future: Future[Mapping[int, RewardScores]]
    scored: dict[int, RewardScores] = field(default_factory=dict)


class RewardPool:
    """Workers that hold the same rewards.

    Workers start at construction, side by side, and nobody waits for them before the first result.

    Args:
        groups_per_call: For each reward, most groups whose rollouts are given in one call.
        secrets: Environment variables of the workers beside the public ones.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        workers: int,
        groups_per_call: Sequence[int],
        *,
        max_growth_bytes: int = MAX_GROWTH_BYTES,
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._rewards, self._max_growth_bytes = tuple(rewards), max_growth_bytes
        self._secrets = secrets
        self._groups_per_call = groups_per_call
        self._tasks: queue.Queue[_Task | None] = queue.Queue()
        self._workers: dict[int, _Worker] = {}
        self._is_closed = False
        self._closing = threading.Lock()
        self._never_starts: RewardError | None = None
        self._threads = [threading.Thread(target=self._drive, args=(index,), daemon=True) for index in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(
        self, rollouts: Sequence[Rollout], rewards: frozenset[int], failures: Failures
    ) -> Future[Mapping[int, RewardScores]]:
        """Score rollouts of one prompt in the background, with the rewards of these places.

        The future raises RewardError: a reward raised that must not, or answered no valid scores. A rollout on which a
        reward hangs or crashes, or raises where that is skipped, stays unscored and is in ``failures``; once these are
        too many, nothing more is tried.

        Raises:
            RuntimeError: The pool is closed.
        """
        task = _Task(rollouts, rewards, failures, Future())
        with self._closing:
            if self._is_closed:
                raise RuntimeError("the reward workers are closed: nothing can be scored any more")
            self._tasks.put(task)
        return task.future

    def close(self) -> None:
        """Cancel calls that have not begun and end the workers; one that is still busy after a second is killed."""
        with self._closing:
            self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while task := self._tasks.get_nowait():
                task.future.cancel()
                task.future.set_running_or_notify_cancel()  # ``wait`` does not hear of a cancelled one before
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for index, thread in enumerate(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            while thread.is_alive():
                if worker := self._workers.get(index):
                    worker.kill()
                thread.join(0.1)

    def _drive(self, index: int) -> None:
        """Keep one worker busy until the queue says None."""
        with contextlib.suppress(OSError):
            self._worker(index)
        while task := self._tasks.get():
            tasks = [each for each in (task, *self._waiting()) if each.future.set_running_or_notify_cancel()]
            for place in range(len(self._rewards)):
                concerned = [each for each in tasks if place in each.rewards]
                size = self._groups_per_call[place]
                for start in range(0, len(concerned), size):
                    self._score(index, place, concerned[start : start + size])
            for each in tasks:
                if not each.future.done():
                    each.future.set_result(each.scored)
        if worker := self._workers.get(index):
            worker.stop()

    def _waiting(self) -> Iterator[_Task]:
        """Tasks for the same call: this worker's fair share of the queue, as far as one call takes it."""
        share = -(-(self._tasks.qsize() + 1) // len(self._threads))
        for _ in range(min(max(self._groups_per_call), share) - 1):
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is None:
                self._tasks.put(None)
                return
            yield task

    def _score(self, index: int, place: int, tasks: Sequence[_Task]) -> None:
        """Give one reward one call's rollouts, and each task its part of the scores."""
        tasks = [task for task in tasks if not task.future.done()]
        call = _Call(self._rewards[place], tasks)
        try:
            call.check()
            while call.left:
                self._ask(self._worker(index), place, call)
        except BaseException as error:
            name = self._rewards[place].name
            stopped = RewardError(f"reward {name!r} was stopped before it was done") if self._is_closed else None
            for task in tasks:
                task.future.set_exception(stopped or error)
            return
        for task, scores in zip(tasks, call.scores(), strict=True):
            task.scored[place] = scores

    def _ask(self, worker: _Worker, place: int, call: _Call) -> None:
        """Ask a worker about the rollouts that are left; if it ends meanwhile, some are still left."""
        left = call.left
        self._await_start(worker)
        try:
            for reply in worker.replies(place, [call.blobs[member] for member in left], call.num_groups):
                call.take(reply, left)
        except _Lost as lost:
            if self._is_closed:
                raise
            missing = call.left
            call.lose(missing[:1] if worker.form(place) == "one by one" else missing, lost)
        call.check()
        if worker.growth_bytes > self._max_growth_bytes:
            worker.stop()

    def _await_start(self, worker: _Worker) -> None:
        """Raises RewardError if workers cannot make their rewards; later calls then raise it at once."""
        try:
            if self._never_starts:
                raise self._never_starts
            worker.await_start()
        except RewardError as error:
            self._never_starts = error
            raise

    def _worker(self, index: int) -> _Worker:
        """The thread's worker, a new one if the last has ended."""
        worker = self._workers.get(index)
        if worker is None or worker.has_ended:
            if worker:
                worker.stop()
            worker = self._workers[index] = _Worker(self._rewards, self._secrets)
        return worker


class _Call:
    """The rollouts that one reward is given at once, and each one's result."""

    def __init__(self, spec: RewardSpec, tasks: Sequence[_Task]) -> None:
        self._spec, self._tasks = spec, tasks
        self._rollouts = [rollout for task in tasks for rollout in task.rollouts]
        self._owners = [task for task in tasks for _ in task.rollouts]
        self._scores: dict[int, float | None] = {}
        self._seconds: dict[int, float] = {}
        self._answers: dict[int, str | None] = {}
        self._parts: dict[int, Mapping[str, float | None]] = {}
        self._spans: dict[int, Sequence[tuple[int, int, float]]] = {}
        self._fault: tuple[Reply, Sequence[int]] | None = None
        self.num_groups = len(tasks)
        self.blobs = [pickle.dumps(rollout, pickle.HIGHEST_PROTOCOL) for rollout in self._rollouts]

    @property
    def left(self) -> list[int]:
        """Places of the rollouts that have no result yet."""
        return [place for place in range(len(self._rollouts)) if place not in self._scores]

    def take(self, reply: Reply, asked: Sequence[int]) -> None:
        """Note what a worker replied about some of the rollouts that it was asked about, a part or all of them."""
        if "culprit" in reply and self._fault:
            self._fault = self._fault[0], [asked[reply["culprit"]]]
            return
        places = asked[reply["start"] : reply["stop"]]
        self._seconds |= dict.fromkeys(places, reply["seconds"] / len(places))
        if "values" in reply:
            self._scores |= zip(places, reply["values"], strict=True)
            self._answers |= zip(places, reply.get("answers", ()), strict=False)
            self._parts |= zip(places, reply.get("parts", ()), strict=False)
            self._spans |= zip(places, reply.get("spans", ()), strict=False)
            self._explain(zip(places, reply.get("reasons", ()), strict=False))
        elif reply["skip"]:
            self._fail(places, " at ".join(filter(None, [reply["what"], reply.get("place")])), reply["details"])
        elif self._fault is None:
            self._fault = reply, places

    def lose(self, places: Sequence[int], lost: _Lost) -> None:
        """Note that a worker ended instead of replying about these, unless a fault has ended the call already."""
        if self._fault is None and places:
            self._seconds |= dict.fromkeys(places, lost.seconds / len(places))
            self._fail(places, lost.cause)

    def check(self) -> None:
        """Raises RewardError if going on is in vain."""
        if self._fault is not None:
            reply, places = self._fault
            raise reward_error(self._spec.name, reply, [self._rollouts[place] for place in places])
        for task in self._tasks:
            task.failures.check()

    def scores(self) -> list[RewardScores]:
        """One per task."""
        bounds = accumulate((len(task.rollouts) for task in self._tasks), initial=0)
        parts = [range(start, end) for start, end in pairwise(bounds)]
        return [
            RewardScores(
                [self._scores[place] for place in part],
                [self._seconds[place] for place in part],
                [self._answers.get(place) for place in part] if self._answers else None,
                [self._parts.get(place, {}) for place in part] if self._parts else (),
                [self._spans.get(place, ()) for place in part] if self._spans else (),
            )
            for part in parts
        ]

    def _explain(self, reasons: Iterable[tuple[int, str]]) -> None:
        for place, why in reasons:
            if why:
                self._owners[place].failures.explain(Failure(self._spec.metric, self._rollouts[place], why))

    def _fail(self, places: Sequence[int], cause: str, details: str = "") -> None:
        for place in places:
            self._scores[place] = None
            failure = Failure(self._spec.metric, self._rollouts[place], cause, details)
            self._owners[place].failures.add(failure)


class _Worker(WorkerProcess):
    """A worker process, seen from the parent.

    Attributes:
        growth_bytes: Resident memory that it gained after its first call.
    """

    def __init__(self, rewards: Sequence[RewardSpec], secrets: Mapping[str, str]) -> None:
        super().__init__("mmrl.rollout.rewards.worker", public_variables() | dict(secrets))
        self._rewards, self._forms = rewards, list[str]()
        self._first_bytes: int | None = None
        self.growth_bytes = 0

    def form(self, place: int) -> str:
        """The reward's way to score: ``one by one``, ``side by side`` or ``together``; known once it has started."""
        return self._forms[place]

    def replies(self, place: int, blobs: Sequence[bytes], num_groups: int) -> Iterator[Reply]:
        """The worker's replies about pickled rollouts of so many groups, each about some of the rollouts.

        Raises:
            _Lost: It ended, or was killed at the deadline, which counts from the last reply.
        """
        timeout_s = self._rewards[place].timeout_s
        factor, grace_s = (num_groups if self.form(place) == "together" else 1), 0.0
        if self.form(place) == "side by side":
            grace_s = _SIDE_BY_SIDE_GRACE_S
        self.send(pickle.dumps((place, blobs)), timeout_s * factor)
        while "resident_bytes" not in (reply := self._reply(timeout_s * factor, grace_s)):
            yield reply
        self._first_bytes = self._first_bytes or reply["resident_bytes"]
        self.growth_bytes = reply["resident_bytes"] - self._first_bytes

    def await_start(self) -> None:
        """Wait until it has made its rewards, if it has not yet.

        Raises:
            RewardError: It cannot.
        """
        if self._forms:
            return
        try:
            self.send(pickle.dumps(self._rewards), START_TIMEOUT_S)
            reply = self._reply(START_TIMEOUT_S)
        except _Lost as lost:
            reply = {"what": lost.cause, "details": lost.details}
        if "error" in reply:
            raise RewardError(details=reply["details"], **reply["error"])
        if "forms" not in reply:
            raise reward_error(reply.get("name") or ", ".join(spec.name for spec in self._rewards), reply)
        self._forms = reply["forms"]

    def _reply(self, timeout_s: float, grace_s: float = 0.0) -> Reply:
        start = time.monotonic()
        try:
            reply = self.receive(timeout_s + grace_s)
        except WorkerProcessEnded as end:
            raise _Lost(f"ended its worker ({end.how})", time.monotonic() - start, end.stderr) from None
        if reply is None:
            raise _Lost(f"did not answer within {timeout_s:g} s; its worker was killed", time.monotonic() - start)
        return reply


class _Lost(Exception):
    """A worker that ended instead of replying, seconds after it was asked."""

    def __init__(self, cause: str, seconds: float, details: str = "") -> None:
        super().__init__(cause)
        self.cause, self.seconds, self.details = cause, seconds, details
