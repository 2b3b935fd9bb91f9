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
        """``perf/*`` of a step.

        - ``perf/<phase>_s``, ``perf/step_s``: seconds by phase, and from the clock's creation to now.
        - ``perf/score_share``: ``perf/score_s / perf/step_s``, the share of the step in which nothing was left to do
          but wait for scores; what is scored while others are generated costs nothing.
        - ``perf/tokens_per_s``: prompt and completion tokens over ``perf/step_s``.
        """
        elapsed = time.perf_counter() - self._start
        waited = self._seconds.get("perf/score_s")
        share = {} if waited is None else {"perf/score_share": waited / elapsed}
        return {**self._seconds, **share, "perf/step_s": elapsed, "perf/tokens_per_s": tokens / elapsed}
