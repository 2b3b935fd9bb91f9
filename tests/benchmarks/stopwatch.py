"""What a measured process notes of itself: seconds by phase, memory of an update, and lines to the one who measures."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_C = ctypes.CDLL(None)


class Stopwatch:
    """Seconds by phase, each moment in the innermost one; ``rest`` is what is in none. Counts the main thread only.

    Args:
        clock: Counts seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._since = clock()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def time(self, owner: Any, method: str, name: str) -> None:
        """Replace a method by one whose calls are a phase."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Seconds since this was last called."""
        self._charge()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def skip(self) -> None:
        """Leave out the time since the last phase began or ended."""
        self._since = self._clock()

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1] if self._open else "rest"] += now - self._since
        self._since = now


class Report:
    """Lines of JSON to the process that measures this one, which then lets others run for a while.

    Each line has the processor seconds of all threads since the one before: ``processor_s``.

    Args:
        descriptors: To read from and to write to.
        watch: Does not count that while.
    """

    def __init__(self, descriptors: Sequence[int], watch: Stopwatch) -> None:
        reading, writing = descriptors
        self._go, self._lines, self._watch = os.fdopen(reading, "rb", 0), os.fdopen(writing, "w"), watch
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._processor = time.process_time()

    def __call__(self, **values: Any) -> None:
        used, self._processor = time.process_time() - self._processor, time.process_time()
        self._lines.write(json.dumps({**values, "processor_s": used}) + "\n")
        self._lines.flush()
        self._go.read(1)
        self._watch.skip()


@contextmanager
def peak_memory(found: dict[str, int]) -> Iterator[None]:
    """Fill in ``before`` and ``peak``: resident bytes before the block, and at most in it (Linux).

    What the allocator keeps of earlier blocks is given back first: it would be resident, and used again unseen.
    """
    _C.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    found["before"] = _status("VmRSS")
    try:
        yield
    finally:
        found["peak"] = _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)
