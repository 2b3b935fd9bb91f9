"""Orders of weights, and the place at which they are given; plain values, which a driver can make without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store of a weights' group, and a sampler rank's place in the group.

    Attributes:
        rank: Its number among the ranks that sample.
        size: The number of those.
    """

    address: str
    port: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Order:
    """A wish for the weights of a version; earlier ones are dropped once it has arrived.

    Attributes:
        number: Counts orders from 0 in the whole life of the store.
        generation: Counts groups: ranks that were started again are in the next one.
    """

    number: int
    generation: int
    version: int

    @property
    def key(self) -> str:
        """The key of the store at which it is given."""
        return order_key(self.number)

    @property
    def answer(self) -> str:
        """The key at which what comes is described, or a failure."""
        return f"weights/{self.number}/answer"

    @property
    def checksum(self) -> str:
        """The key of the checksum of all that was sent."""
        return f"weights/{self.number}/checksum"

    @property
    def fault(self) -> str:
        """The key of the reason why the sender has given up."""
        return f"weights/{self.number}/fault"


def order_key(number: int) -> str:
    """The key of the order of a number."""
    return f"weights/{number}/order"
