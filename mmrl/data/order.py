"""The order of prompts.

Order and seeds are pure functions of names and positions, never of what ran before: a resumed run, another number
of ranks or a refilled batch draws the same prompts with the same randomness.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mmrl.errors import DataError
from mmrl.types import IntArray

MAX_GROUP_SIZE = 2**16


class Order(ABC):
    """The rows by position, counted from the start of the run: the position is the whole state."""

    @abstractmethod
    def at(self, position: int) -> tuple[int, int]:
        """(epoch, row index) at a position."""

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, row index) at ``count`` positions from ``start``."""
        return [self.at(position) for position in range(start, start + count)]


class PromptOrder(Order):
    """``permutation(seed, epoch)[position]``: every row once per epoch, in an order of that epoch's own.

    Args:
        name: Gives each of several datasets orders of its own.
    """

    def __init__(self, num_rows: int, seed: int, name: str = "") -> None:
        if num_rows < 1:
            raise DataError("There are no rows to put in order")
        self.num_rows = num_rows
        self._key = f"{seed}/{name}/" if name else f"{seed}/"
        self._epoch = -1
        self._permutation: IntArray = np.zeros(0, np.int64)

    def at(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self.num_rows)
        if epoch != self._epoch:
            # Sorted raw keys rather than Generator.permutation: NumPy keeps bit streams stable, not algorithms.
            keys = np.random.PCG64(_hash(f"{self._key}{epoch}", 16)).random_raw(self.num_rows)
            self._epoch, self._permutation = epoch, np.argsort(keys, kind="stable")
        return epoch, int(self._permutation[offset])


class WeightedOrder(Order):
    """Several datasets by weight, each in epochs of its own; rows are counted through all of them.

    After any number of positions, each of k datasets has had its exact share within ``1 - 1 / (2k - 2)`` rows, which
    no rule can better: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). A batch, then,
    has its shares within twice that. Which dataset has which position does not depend on the seed.

    Args:
        sizes: Rows of each dataset; it has two or more.
        weights: In any unit.
        names: The datasets' names.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], names: Sequence[str], seed: int) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._orders = [PromptOrder(size, seed, name) for size, name in zip(sizes, names, strict=True)]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._restart()

    def at(self, position: int) -> tuple[int, int]:
        if position < self._drawn - 1:
            self._restart()
        while self._drawn <= position:
            self._draw()
        epoch, row = self._orders[self._latest].at(self._counts[self._latest] - 1)
        return epoch, self._offsets[self._latest] + row

    def _restart(self) -> None:
        self._drawn, self._latest, self._counts = 0, 0, [0] * len(self._shares)

    def _draw(self) -> None:
        """Choose, among the datasets that have waited long enough, the one that would first have waited too long."""
        self._drawn += 1
        least = 1 / (2 * len(self._shares) - 2)
        owed = [share * self._drawn - count for share, count in zip(self._shares, self._counts, strict=True)]
        waiting = [index for index, rows in enumerate(owed) if rows >= least - 1e-9]
        self._latest = min(waiting, key=lambda index: (1 - least - owed[index]) / self._shares[index])
        self._counts[self._latest] += 1


def request_seed(run_seed: int, epoch: int, prompt_id: str, attempt: int) -> int:
    """A seed below 2**62 whose low 16 bits are zero, so that member ``i`` of the group can use ``seed + i``."""
    return _hash(f"{run_seed}/{epoch}/{attempt}/{prompt_id}", 8) % 2**62 // MAX_GROUP_SIZE * MAX_GROUP_SIZE


def part_seed(group_seed: int, member: int, prompt_id: str, part: int, turn: int = 0) -> int:
    """The seed of a further part of a turn that was cut.

    Args:
        part: The number of parts before.
    """
    return request_seed(group_seed, member, f"part/{part}/{prompt_id}", turn)


def view_seed(run_seed: int, epoch: int, prompt_id: str, view: str, place: int) -> int:
    """The seed of a view of the image at this place of a prompt."""
    return _hash(f"view/{run_seed}/{epoch}/{view}/{place}/{prompt_id}", 8)


def _hash(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=num_bytes).digest(), "big")
