"""Seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by phase, from its creation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under ``perf/<name>_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"perf/{name}_s"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """``perf/*``: seconds by phase and of the whole step, and prompt plus completion tokens per second."""
        elapsed = time.perf_counter() - self._start
        return {**self._seconds, "perf/step_s": elapsed, "perf/tokens_per_s": tokens / elapsed}
