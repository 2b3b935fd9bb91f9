"""Rewards in worker processes that can be killed: a reward may raise, hang or crash without taking the run along.

A worker (``mmrl.reward_worker``) is a child with an environment without the user's secrets. One thread here drives one
worker; groups are scored in whatever order workers are free, and each future carries its own group, so nothing depends
on that order.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from mmrl.child import Child, ChildEnded
from mmrl.config import RewardSpec
from mmrl.errors import PluginError
from mmrl.redaction import names_a_secret
from mmrl.types import BoolArray, RolloutGroup, ScoredGroup

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
START_TIMEOUT_S = 120.0
"""For a worker to import and make its rewards; not part of any reward's own deadline."""
_STOP_TIMEOUT_S = 1.0


class RewardError(PluginError):
    """A reward that raised, hung, crashed, or answered something else than scores."""

    def __init__(self, what: str, *, details: str = "", where: str = "", possible: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, possible=possible, remedy=remedy)
        self.details = details


@dataclass(frozen=True, slots=True)
class _Task:
    group: RolloutGroup
    future: Future[ScoredGroup]


class Scorer:
    """Scores groups with all rewards of a run; use it as a context manager.

    Workers start at construction, side by side, and nobody waits for them before the first result; without rewards
    (supervised runs) there are none.
    """

    def __init__(self, rewards: Sequence[RewardSpec], workers: int = DEFAULT_WORKERS) -> None:
        self._rewards = tuple(rewards)
        self._tasks: queue.Queue[_Task | None] = queue.Queue()
        self._workers: dict[int, _Worker] = {}
        indices = range(workers if rewards else 0)
        self._threads = [threading.Thread(target=self._drive, args=(index,), daemon=True) for index in indices]
        for thread in self._threads:
            thread.start()

    def submit(self, group: RolloutGroup) -> Future[ScoredGroup]:
        """Score a group in the background.

        The future raises RewardError: a reward raised, crashed its worker, passed its ``timeout_s`` on this group,
        or answered anything but one finite number or None per rollout. Other groups are not touched by that.
        """
        assert self._rewards, "nothing to score with"
        future: Future[ScoredGroup] = Future()
        self._tasks.put(_Task(group, future))
        return future

    def close(self) -> None:
        """Cancel what has not begun and end the workers; one that is still busy after a second is killed."""
        with contextlib.suppress(queue.Empty):
            while task := self._tasks.get_nowait():
                task.future.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for index, thread in enumerate(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            while thread.is_alive():
                if worker := self._workers.get(index):
                    worker.kill()
                thread.join(0.1)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, index: int) -> None:
        """Keep one worker busy until the queue says None."""
        with contextlib.suppress(OSError):
            self._worker(index)
        while task := self._tasks.get():
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                scores = self._worker(index).score(task.group)
                task.future.set_result(_combine(task.group, self._rewards, scores))
            except BaseException as error:
                task.future.set_exception(error)
        if worker := self._workers.get(index):
            worker.stop()

    def _worker(self, index: int) -> _Worker:
        """The thread's worker, a new one if the last has ended."""
        worker = self._workers.get(index)
        if worker is None or worker.has_ended:
            if worker:
                worker.stop()
            worker = self._workers[index] = _Worker(self._rewards)
        return worker


class _Worker(Child):
    """A worker process, seen from the parent."""

    def __init__(self, rewards: Sequence[RewardSpec]) -> None:
        super().__init__("mmrl.reward_worker", _environment())
        self._rewards, self._ready = rewards, False

    def score(self, group: RolloutGroup) -> list[list[float | None]]:
        """Each reward's scores of the group, in the rewards' order.

        Raises:
            RewardError: See ``Scorer.submit``.
        """
        if not self._ready:
            self._await_start()
        request = pickle.dumps(pickle.dumps(group, pickle.HIGHEST_PROTOCOL))
        scores: list[list[float | None]] = []
        for spec in self._rewards:
            reply = self._answer(b"" if scores else request, spec.timeout_s)
            if "values" not in reply:
                raise _reward_error(spec.name, reply, group)
            scores.append(reply["values"])
        return scores

    def _await_start(self) -> None:
        reply = self._answer(pickle.dumps(self._rewards), START_TIMEOUT_S)
        if "error" in reply:
            raise RewardError(details=reply["details"], **reply["error"])
        if "ready" not in reply:
            name = reply.get("name") or ", ".join(spec.name for spec in self._rewards)
            raise _reward_error(name, reply)
        self._ready = True

    def _answer(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """The worker's next reply, or the tale of its end."""
        try:
            reply = self.ask(request, timeout_s)
        except ChildEnded as end:
            return {"what": f"ended its worker ({end.how})", "details": end.stderr}
        if reply is None:
            remedy = "correct the reward, or raise its timeout_s if it only needs longer"
            return {"what": f"did not answer within {timeout_s:g} s; its worker was killed", "remedy": remedy}
        return reply


def _environment() -> dict[str, str]:
    """What a worker sees: no secrets, and one order of sets and hashes in every run."""
    public = {name: value for name, value in os.environ.items() if not names_a_secret(name)}
    return {"PYTHONHASHSEED": "0", **public}


def _reward_error(name: str, reply: Mapping[str, Any], group: RolloutGroup | None = None) -> RewardError:
    sample = ""
    if group:
        index = reply.get("index")
        members = f"rollouts 0 to {len(group.rollouts) - 1}" if index is None else f"rollout {index}"
        sample = f"prompt {group.prompt.id!r}, {members}"
    return RewardError(
        f"reward {name!r} {reply['what']}",
        where="; ".join(filter(None, [sample, reply.get("place")])),
        possible=reply.get("possible", ""),
        remedy=reply.get("remedy", "correct the reward"),
        details=reply.get("details", ""),
    )


def _combine(
    group: RolloutGroup, rewards: Sequence[RewardSpec], scores: Sequence[Sequence[float | None]]
) -> ScoredGroup:
    """The weighted sum; a rollout that any reward could not score is invalid and has reward 0."""
    table = np.array([[np.nan if score is None else score for score in column] for column in scores], np.float64)
    weights = np.array([[spec.weight] for spec in rewards], np.float64)
    total = (weights * table).sum(axis=0)
    valid: BoolArray = ~np.any(np.isnan(table), axis=0)
    components = {spec.metric: column for spec, column in zip(rewards, table, strict=True)}
    return ScoredGroup(group, np.where(valid, total, 0.0), valid, components)
