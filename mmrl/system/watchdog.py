"""A deadline for blocks that may hang: generation, a collective, a write to a dead file system."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 60.0
"""Seconds in which a block has to end once it has been made to raise."""


class Watchdog:
    """Ends blocks that take too long, from a thread of its own.

    Args:
        timeout_s: Seconds that a block may take; None sets no limit.
        interrupt: Called with the block's name, at most once for each block; makes it raise, or answers False.
        end: Called with the name if that does not help; ends the process.
    """

    def __init__(self, timeout_s: float | None, interrupt: Callable[[str], bool], end: Callable[[str], object]) -> None:
        self._timeout_s, self._interrupt, self._end = timeout_s, interrupt, end

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch a block; nothing is called after it."""
        if self._timeout_s is None:
            yield
            return
        done, lock = threading.Event(), threading.Lock()

        def guard() -> None:
            if done.wait(self._timeout_s):
                return
            with lock:
                if done.is_set():
                    return
                is_hopeless = not self._interrupt(what)
            if is_hopeless or not done.wait(GRACE_S):
                with lock:
                    if not done.is_set():
                        self._end(what)

        threading.Thread(target=guard, daemon=True).start()
        try:
            yield
        finally:
            with lock:
                done.set()
