"""Memory that was freed, and that the allocator keeps for itself.

glibc keeps what was freed between two things that are still in use, and uses little of it again for aligned blocks,
such as torch's. A rank grew by 1.9 MB with each image of 448 pixels that came and went (glibc 2.36).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import psutil

KEPT_BYTES = 2**30
"""Bytes by which a process may grow before what it has freed is given back: the next use of that memory takes time."""


class FreedMemory:
    """Gives freed memory back to the system; does nothing where the allocator is not glibc's.

    Args:
        kept_bytes: Growth of the resident memory, since it was last given back, up to which nothing is done.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._process, self._kept_bytes, self._resident = psutil.Process(), kept_bytes, 0

    def give_back(self) -> bool:
        """Give it back if it may be much; True if it did."""
        if self._trim is None or self._process.memory_info().rss - self._resident <= self._kept_bytes:
            return False
        self._trim(0)
        self._resident = self._process.memory_info().rss
        return True
