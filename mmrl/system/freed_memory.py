"""Memory that was freed, and that the allocator keeps for itself.

glibc keeps what was freed between two things that are still in use, and finds little of it again for aligned blocks
such as torch's. A rank's memory grew by 1.9 MB with each image of 448 pixels that came and went (glibc 2.36).
"""

from __future__ import annotations

import ctypes
import os

import psutil

KEPT_BYTES = 2**30
"""Bytes by which a process may grow before what it has freed is given back: the next use of that memory takes time."""
MAPPED_BYTES = 2**25
"""Blocks of this size and more are mapped by themselves, and go back when they are freed; glibc takes no larger one."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers of two settings."""
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Environment variables of the user's own settings."""
_keeps = False
"""True if this process keeps what it has freed: the allocator's settings are the whole process's."""


def keep_freed() -> bool:
    """Let this process keep freed blocks of less than ``MAPPED_BYTES`` for its next ones, see ``FreedMemory``.

    glibc would give the end of its heap back at once. The kernel clears such memory when it is used again, which takes
    0.05 to 0.4 s a GB. Where a virtual machine tells its host of free pages, it took 1.5 s a GB a few seconds later.

    Returns:
        False where the user has settings of glibc's, or the allocator is another one; nothing is changed there.
    """
    global _keeps
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None or any(map(os.environ.__contains__, _OWN)) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    _keeps = bool(option(_MMAP_THRESHOLD, MAPPED_BYTES) and option(_TRIM_THRESHOLD, -1))
    return _keeps


def trim_heap() -> bool:
    """Give freed memory back to the system; False where the allocator is not glibc's, which alone has a call for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) >= 0


class FreedMemory:
    """Gives freed memory back to the system when it may be much. It looks at one moment of a step, such as its end.

    Args:
        kept_bytes: Growth of the resident memory, since it was last given back, up to which nothing is done. Where the
            process keeps freed memory, it grows from the first look after that: a step needs as much as the one before.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._process, self._kept_bytes = psutil.Process(), kept_bytes
        self._resident: int | None = 0

    def give_back(self) -> bool:
        """Give it back if it may be much; True if it did."""
        resident = self._process.memory_info().rss
        if self._resident is None:
            self._resident = resident
        if resident - self._resident <= self._kept_bytes or not trim_heap():
            return False
        self._resident = None if _keeps else self._process.memory_info().rss
        return True
