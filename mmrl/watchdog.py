"""A deadline for what may hang: generation, a collective, a write to a dead file system."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """Calls ``expire`` from a thread of its own when a watched block takes too long.

    Args:
        timeout_s: Seconds that a block may take; None lets it take for ever.
        expire: Called with what was watched, once at most for each block.
    """

    def __init__(self, timeout_s: float | None, expire: Callable[[str], None]) -> None:
        self._timeout_s, self._expire = timeout_s, expire

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch a block."""
        if self._timeout_s is None:
            yield
            return
        timer = threading.Timer(self._timeout_s, self._expire, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
