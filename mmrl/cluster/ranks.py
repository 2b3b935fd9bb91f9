"""The processes of a group of ranks, as the group sees them: their locations, and calls to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from mmrl.cluster.guard import Process


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

    locations: Sequence[RankLocation]
    """Each rank's location."""

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """A call of the rank's worker; calls to one rank run in order.

        The future raises what the worker raised: MMRLError, RankLostError, or RuntimeError with the rank's traceback.
        """
        ...

    def watch(self, lost: Callable[[int], None]) -> None:
        """Call ``lost`` with the rank, from another thread, soon after a rank's process has ended."""
        ...

    def last_words(self, rank: int) -> str:
        """The account that a lost rank's node gives of memory that ran out; empty if it has none."""
        ...

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        """End all processes, with time to end by themselves if ``wait``; remove a folder of each of these nodes."""
        ...


def verb_of(method: str) -> str:
    """The learner's or sampler's verb for a call of a worker."""
    return "generate" if method in ("submit", "answer", "advance", "drop") else method
