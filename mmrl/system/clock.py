"""Seconds by phase, with the tokens and operations of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Span = Callable[[str], AbstractContextManager[object]]
"""Marks a block in a trace under a name; see ``profiling``."""


class Clock:
    """Adds up seconds by phase, from its creation. Phases follow each other: none runs within another.

    Args:
        span: Entered with the name of each phase as it begins.
    """

    def __init__(self, span: Span = lambda name: nullcontext()) -> None:
        self._span = span
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._flops = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block under ``perf/<name>_s``."""
        start = time.perf_counter()
        try:
            with self._span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def count(self, phase: str, tokens: int) -> None:
        """Note tokens that a phase has sampled, or learned from."""
        self._tokens[phase] = self._tokens.get(phase, 0) + tokens

    def beside(self, name: str, seconds: float) -> None:
        """Note seconds under ``perf/<name>_s`` that passed within or beside the phases, and are in no sum."""
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def absorb(self, other: Clock) -> None:
        """Note the phases of a clock that ran beside this one, in another thread: their seconds are in no sum."""
        for name, seconds in [*other._seconds.items(), *other._beside.items()]:
            self.beside(name, seconds)
        for name, tokens in other._tokens.items():
            self.count(name, tokens)

    def count_flops(self, flops: int) -> None:
        """Note operations that the phase ``update`` needed, of all ranks together."""
        self._flops += flops

    def metrics(self, tokens: int, peak_flops_per_s: float | None = None) -> dict[str, float]:
        """``perf/*`` of a step.

        - ``perf/<phase>_s``, ``perf/step_s``: seconds by phase, and from the clock's creation to now.
        - ``perf/other_s``: seconds of the step outside every phase, so that all of these sum to ``perf/step_s``.
          Phases of a clock that was absorbed are in no sum; ``perf/wait_s`` is the time that the step waited for them.
        - ``perf/environment_s``: seconds of all calls of environments, of those that run side by side as well.
        - ``perf/environment_wait_s``: seconds of ``perf/generate_s`` in which the sampler, or a part of its ranks, took
          no step because the answer to a turn was due and not there; not those that resets and scores took.
        - ``perf/score_share``: ``perf/score_s / perf/step_s``, the share of the step that was spent waiting for scores;
          scoring beside generation costs nothing.
        - ``perf/tokens_per_s``: prompt and completion tokens over ``perf/step_s``.
        - ``perf/generate_tokens_per_s``: completion tokens that were sampled over ``perf/generate_s``.
        - ``perf/update_tokens_per_s``: completion tokens in the loss, of every optimizer step, over ``perf/update_s``.
        - ``perf/mfu``: operations that the optimizer steps need (``ops.cost``: forward and backward, vision tower and
          attended pairs; shared parts count once, recomputation by checkpointing does not count), over
          ``perf/update_s * peak_flops_per_s``.

        Args:
            peak_flops_per_s: Peak of the devices of all ranks together; None if it is not known, and then there is no
                ``perf/mfu``.
        """
        elapsed = time.perf_counter() - self._start
        seconds = {f"perf/{name}_s": value for name, value in self._seconds.items()}
        seconds["perf/other_s"] = elapsed - sum(seconds.values())
        for name, value in self._beside.items():
            seconds[f"perf/{name}_s"] = seconds.get(f"perf/{name}_s", 0.0) + value
        rates = {f"perf/{name}_tokens_per_s": count / seconds[f"perf/{name}_s"] for name, count in self._tokens.items()}
        if "perf/score_s" in seconds:
            rates["perf/score_share"] = seconds["perf/score_s"] / elapsed
        if self._flops and peak_flops_per_s:
            rates["perf/mfu"] = self._flops / (self._seconds["update"] * peak_flops_per_s)
        return {**seconds, **rates, "perf/step_s": elapsed, "perf/tokens_per_s": tokens / elapsed}
