"""The processes of a group of ranks, as the group sees them: their locations, and calls to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from mmrl.cluster.failures import DeadRankError
from mmrl.cluster.guard import Process
from mmrl.config.cluster import ClusterConfig


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The location of a rank.

    Attributes:
        node: The cluster's id of the node.
        host: Its name for people.
        address: The address by which other nodes reach it.
    """

    node: str
    host: str
    address: str
    process: Process


class Ranks(Protocol):
    """The processes of a group, one ``RankWorker`` each."""

    @property
    def locations(self) -> Sequence[RankLocation]:
        """Each rank's location."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Each rank's name for people."""
        ...

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """A call of the rank's worker; calls to one rank run in order.

        The future raises what the worker raised: MMRLError, RankLostError, or RuntimeError with the rank's traceback.
        """
        ...

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        """Call ``lost`` with the rank, from another thread, soon after the first of these ranks' processes has ended.

        Args:
            ranks: None for all of them.
        """
        ...

    def restart(self, ranks: Sequence[int]) -> None:
        """End the processes of these ranks, if they still run, and start others in their places.

        Raises:
            ResourceError: Their nodes do not give them.
        """
        ...

    def last_words(self, rank: int) -> str:
        """The account that a lost rank's node gives of memory that ran out; empty if it has none."""
        ...

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        """End all processes, with time to end by themselves if ``wait``; remove a folder of each of these nodes."""
        ...


class RankPart:
    """Implements ``Ranks``: some of the ranks, numbered from 0. Who has the whole closes it.

    Args:
        numbers: Their numbers in the whole, one after the other.
    """

    def __init__(self, whole: Ranks, numbers: range) -> None:
        self._whole, self.numbers = whole, numbers
        self.names = [whole.names[number] for number in numbers]

    @property
    def locations(self) -> Sequence[RankLocation]:
        return [self._whole.locations[number] for number in self.numbers]

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            if (error := done.exception()) is None:
                answer.set_result(done.result())
                return
            if isinstance(error, DeadRankError):
                error.rank = rank
            answer.set_exception(error)

        self._whole.call(self.numbers[rank], method, *args).add_done_callback(pass_on)
        return answer

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        own = self.numbers if ranks is None else [self.numbers[rank] for rank in ranks]
        self._whole.watch(lambda number: lost(self.numbers.index(number)), own)

    def restart(self, ranks: Sequence[int]) -> None:
        self._whole.restart([self.numbers[rank] for rank in ranks])

    def last_words(self, rank: int) -> str:
        return self._whole.last_words(self.numbers[rank])

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        """Do nothing: the whole is closed."""


def rank_names(cluster: ClusterConfig) -> list[str]:
    """The names of all ranks, in the order of their numbers: those that sample alone come first."""
    if not cluster.is_split:
        return [f"rank {number}" for number in range(cluster.num_ranks)]
    samplers = [f"sampler rank {number}" for number in range(cluster.num_sampler_ranks)]
    return samplers + [f"learner rank {number}" for number in range(cluster.num_learner_ranks)]


def verb_of(method: str) -> str:
    """The learner's or sampler's verb for a call of a worker."""
    if method == "take_weights":
        return "sync"
    return "generate" if method in ("submit", "answer", "advance", "drop") else method
