"""The prompts of a run as it draws them; those of the next step are made while the policy still learns."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from mmrl.data.order import Order
from mmrl.data.prompts import PromptSource
from mmrl.errors import MMRLError
from mmrl.types import GroupKey, Prompt

HANGS_S = 30.0
"""Seconds after which a row that is being read is not waited for when a run ends."""

SPARE = 8
"""One row in so many is looked up beyond those that are to be made, for those that cannot be used."""

_WINDOW = 256
"""Positions that are looked up at first for groups that were drawn before; twice as many each time after that."""

_T = TypeVar("_T")


class PromptPrefetcher(Generic[_T]):
    """A source's prompts as ``make`` makes them, in the order of the run.

    Nothing that is drawn depends on what was prepared: a prompt that cannot be made is left to the draw, which makes it
    again and tells of it; one that is never drawn leaves at most images in the store, which a run that goes on uses.

    Args:
        make: Turns a prompt into the object to draw; called from one thread at a time, not always the main one.

    Attributes:
        position: Prompts drawn from the order so far, the useless ones too: the position of the next one.
    """

    def __init__(self, source: PromptSource, order: Order, make: Callable[[Prompt], _T]) -> None:
        self._source, self._order, self._make = source, order, make
        self.position = 0
        self._next: list[tuple[int, int]] = []  # positions from the next one on, as far as they were looked up
        self._made: dict[int, _T] = {}
        self._thread: threading.Thread | None = None
        self._is_enough = threading.Event()

    def go_to(self, position: int) -> None:
        """Go on from a position of the order."""
        self.stop()
        self.position, self._next = position, []

    def draw(self, count: int) -> list[tuple[int, _T]]:
        """(epoch, result of ``make``) of the next ``count`` prompts; the next prompt replaces one of no use.

        Raises:
            DataError: Too many are of no use.
        """
        self.wait()
        drawn: list[tuple[int, _T]] = []
        while len(drawn) < count:
            rows = self._look_up(count - len(drawn))
            self.position, self._next = self.position + len(rows), self._next[len(rows) :]
            found = [(epoch, self._take(row)) for epoch, row in rows]
            drawn += [(epoch, value) for epoch, value in found if value is not None]
        self._made.clear()
        return drawn

    def find(self, keys: Collection[GroupKey]) -> dict[GroupKey, Prompt]:
        """The rows of groups that were drawn before the position, as ``make`` was given them, by the groups' keys.

        They are looked for from the position back, and most runs have drawn them last.
        """
        self.wait()
        found, end, window = dict[GroupKey, Prompt](), self.position, _WINDOW
        while end > 0 and len(found) < len(keys):
            start = max(end - window, 0)
            for epoch, row in reversed(self._order.take(start, end - start)):
                with suppress(MMRLError):  # a row of no use, which nobody has drawn
                    prompt = self._source[row]
                    if (epoch, prompt.id) in keys:
                        found.setdefault((epoch, prompt.id), prompt)
            end, window = start, 2 * window
        return found

    def prepare(self, count: int) -> None:
        """Begin to make the next ``count`` prompts in a thread; it reads rows until ``wait``, or another call, ends.

        Rows that cannot be used do not count; the next ones are made in their place, as they will be drawn.
        """
        self.stop()
        # The filter of the thread that decodes beside this one would end with whichever of them is done first.
        warnings.filterwarnings("ignore", module=r"PIL\b")
        rows = [row for _, row in self._look_up(count + count // SPARE + 1)] if count else []
        self._thread = threading.Thread(
            target=self._fill, args=(rows, count, self._made, self._is_enough), name="mmrl-prompts", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is prepared: rows are read by one thread at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def stop(self) -> None:
        """Prepare no more, and forget the prepared prompts; no other thread reads or writes anything after this.

        A row that hangs, perhaps on a file system that is gone, is the exception: its thread is left behind.
        """
        self._is_enough.set()
        if self._thread is not None:
            self._thread.join(HANGS_S)
            self._thread = None
        self._is_enough = threading.Event()
        self._made = {}

    def _look_up(self, count: int) -> list[tuple[int, int]]:
        known = len(self._next)
        if known < count:
            self._next += self._order.take(self.position + known, count - known)
        return self._next[:count]

    def _take(self, row: int) -> _T | None:
        return self._source.attempt(row, self._make, self._made.pop(row, None))

    def _fill(self, rows: Sequence[int], count: int, found: dict[int, _T], is_enough: threading.Event) -> None:
        for row in rows:
            if is_enough.is_set() or not count:
                return
            try:
                made = self._source.make(row, self._make)
            except Exception:  # the draw makes it again, and tells
                continue
            if made is not None:
                found[row], count = made, count - 1
