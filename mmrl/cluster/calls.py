"""Calls to many ranks, which wait for each other: when one fails, the others' calls fail with it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from mmrl.cluster.failures import LESS_MEMORY, DeadRankError, cause_of, errors_of, loss_of
from mmrl.cluster.files import Node
from mmrl.cluster.ranks import Ranks, verb_of
from mmrl.errors import MMRLError, RankLostError
from mmrl.system.signals import defer_signals

CAUSE_S = 3.0
"""Seconds in which the cause of a failure may show itself: a rank that dies lets others fail first."""


class RankCalls:
    """Calls ranks, and gives all of them up when one is lost.

    Attributes:
        nodes: Each rank's node.
        names: Each rank's name for people.
        failed: True if ranks may wait for each other for ever; they then get no time to end by themselves.
        abandoned: Raises the error with which the group is abandoned, once it is.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        ids = [location.node for location in ranks.locations]
        nodes = {each.node: Node(each.node, each.host, ids.index(each.node)) for each in ranks.locations}
        self.nodes = [nodes[name] for name in ids]
        self.names = ranks.names
        self.failed = False
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], tuple[int, str]] = {}  # those in progress, in order
        self.abandoned: Future[Any] = Future()
        ranks.watch(self._lose)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """As ``Ranks.call``; the future also raises the error with which the group is abandoned."""
        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            with self._lock:
                if self._calls.pop(answer, None) is None:  # abandoned
                    return
            if error := done.exception():
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        with defer_signals():
            with self._lock:
                if self.abandoned.done():
                    return self.abandoned
                self._calls[answer] = rank, method
            self._ranks.call(rank, method, *args).add_done_callback(pass_on)
        return answer

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """A rank's answer to a call in which it waits for no other: the group survives errors of the call."""
        future = self.call(rank, method, *args)
        wait([future])
        if isinstance(future.exception(), RankLostError):
            self.check([future])
        return future.result()

    def directly(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """As ``Ranks.call``, also of a group that is abandoned."""
        return self._ranks.call(rank, method, *args)

    def all(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Call all ranks at once; their answers by rank.

        Args:
            each: A further first argument for each rank.
        """
        own = [()] * len(self.nodes) if each is None else [(argument,) for argument in each]
        return self.some(method, {rank: (*first, *args) for rank, first in enumerate(own)})

    def some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call some ranks at once, each with its arguments; their answers in the same order."""
        with defer_signals():  # else some ranks would wait for the others for ever
            futures = [self.call(rank, method, *own) for rank, own in arguments.items()]
        return self.answers(futures)

    def answers(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """The calls' answers, in order; raises as ``check``."""
        wait(futures, return_when=FIRST_EXCEPTION)
        self.check(futures)
        return [future.result() for future in futures]

    def check(self, futures: Iterable[Future[Any]]) -> None:
        """Raise if any call has failed: of several errors, raise the one that explains the others."""
        futures = list(futures)
        errors = errors_of(futures)
        if not errors:
            return
        self.failed = True  # the other ranks may wait for this one for ever
        if not any(isinstance(error, RankLostError) for error in errors):
            wait(futures, timeout=CAUSE_S)
            if any(map(loss_of, errors_of(futures))):
                # All ranks may have answered though one is gone: the guard of its node will say so.
                wait([self.abandoned], timeout=CAUSE_S)
            errors += [error for error in errors_of([*futures, self.abandoned]) if error not in errors]
        cause = cause_of(errors)
        if isinstance(cause, DeadRankError) and (words := self._ranks.last_words(cause.rank)):
            cause.what, cause.remedy = f"{cause.what.partition('; ')[0]}; {words}", LESS_MEMORY
        raise cause

    def abandon(self, error: MMRLError) -> bool:
        """Make every call in progress, and every later one, raise ``error``; the ranks go on with their work.

        The error then also says which ranks have not answered.
        """
        if late := self.late():
            error.where = "; ".join(filter(None, [error.where, f"no answer from {', '.join(late)}"]))
        self.give_up(error)
        return True

    def late(self) -> list[str]:
        """The ranks that have not answered yet, for people: each with its host and what it does."""
        return [f"{self.names[rank]} on {self.nodes[rank].host} (`{verb}`)" for rank, verb in self.waiting().items()]

    def loss(self, seconds: float = 0.0) -> MMRLError | None:
        """The error with which the group is abandoned, waited for so long; None if it is not."""
        wait([self.abandoned], timeout=seconds)
        found = self.abandoned.exception() if self.abandoned.done() else None
        return found if isinstance(found, MMRLError) else None

    def waiting(self) -> dict[int, str]:
        """The verb of each rank that has not answered yet."""
        with self._lock:
            calls = list(self._calls.values())
        first = {rank: verb_of(method) for rank, method in reversed(calls)}
        return dict(sorted(first.items()))

    def _lose(self, rank: int) -> None:
        """A rank has ended: the others' work is in vain, though they may not have noticed."""
        if not self.abandoned.done():
            host, doing = self.nodes[rank].host, self.waiting().get(rank, "")
            self.give_up(DeadRankError(rank, host, doing, "its process has ended", name=self.names[rank]))

    def give_up(self, error: MMRLError) -> None:
        """Make every call in progress, and every later one, raise ``error``."""
        with self._lock:
            self.failed = True
            if not self.abandoned.done():
                self.abandoned.set_exception(error)
            calls, self._calls = self._calls, {}
        for answer in calls:
            answer.set_exception(error)
