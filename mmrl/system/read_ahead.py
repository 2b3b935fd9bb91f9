"""Values that threads compute before they are asked for."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

AHEAD = 2
"""Values that are computed ahead for each thread: one under way, and one that waits to be taken."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class ReadAhead(Generic[_K, _V]):
    """Calls a function; for keys that were announced, threads have called it before.

    Each value is handed out once, and not kept. One thread at a time may use an object.

    Args:
        read: May be called from several threads at once.
        threads: With 0, nothing is read ahead.
    """

    def __init__(self, read: Callable[[_K], _V], threads: int) -> None:
        self._read, self._threads = read, threads
        self._pool: ThreadPoolExecutor | None = None
        self._announced: deque[_K] = deque()
        self._under_way: OrderedDict[_K, Future[_V]] = OrderedDict()

    def announce(self, keys: Iterable[_K]) -> None:
        """Tell which keys come next, in order, after those that were told before."""
        if self._threads:
            known = {*self._under_way, *self._announced}
            self._announced.extend(key for key in dict.fromkeys(keys) if key not in known)
            self._go_on()

    def __call__(self, key: _K) -> _V:
        """The function's value, or its exception. Keys that were announced before this one are not read any more."""
        if key not in self._under_way:
            if key in self._announced:  # all that is under way was passed over, and would keep others from being read
                while self._under_way:
                    self._under_way.popitem()[1].cancel()
                while self._announced.popleft() != key:
                    pass
                self._go_on()
            return self._read(key)
        while next(iter(self._under_way)) != key:
            self._under_way.popitem(last=False)[1].cancel()
        value = self._under_way.pop(key)
        self._go_on()
        return value.result()

    def forget(self) -> None:
        """Take back all announcements."""
        self._announced.clear()
        while self._under_way:
            self._under_way.popitem()[1].cancel()

    def _go_on(self) -> None:
        while self._announced and len(self._under_way) < AHEAD * self._threads:
            self._pool = self._pool or ThreadPoolExecutor(self._threads, "mmrl-read-ahead")
            key = self._announced.popleft()
            self._under_way[key] = self._pool.submit(self._read, key)
