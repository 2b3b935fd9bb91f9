"""``mmrl train --profile``: a trace of a few steps, for a public viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from mmrl.errors import ResourceError

VIEWER = "https://ui.perfetto.dev (or chrome://tracing)"


class TracedEngine(Protocol):
    """The part of ``Engine`` that is needed here."""

    def start_trace(self) -> None: ...

    def stop_trace(self, path: Path | None) -> None: ...

    def span(self, name: str) -> AbstractContextManager[object]: ...


class Profiler:
    """Traces the second step of an attempt and those after it; the first one only if there is no other.

    The first step is unlike the others: it checks the engines' numbers, and warms them up.

    Args:
        engine: Rank 0's process and device are recorded.
        folder: Folder of the traces.
        steps: Number of steps to record; 0 records nothing.
        last: The run's last step.
        tell: Called with a kind and a message.
    """

    def __init__(
        self, engine: TracedEngine, folder: Path, steps: int, last: int, tell: Callable[[str, str], None]
    ) -> None:
        self._engine, self._folder, self._steps, self._last = engine, folder, steps, last
        self._tell = tell
        self._seen, self._begun = 0, 0

    def span(self, name: str) -> AbstractContextManager[object]:
        """Marks a block of the driver's, where it runs in rank 0's process; see ``Engine.span``."""
        return self._engine.span(name) if self._begun else nullcontext()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record a step if it is one to record; the recording is dropped if the step fails."""
        self._seen += 1
        if self._steps and not self._begun and (self._seen == 2 or step == self._last):
            self._engine.start_trace()
            self._begun = step
        if not self._begun:
            yield
            return
        try:
            with self._engine.span(f"step {step}"):
                yield
        except BaseException:
            self._steps = self._begun = 0
            with suppress(Exception):  # what ended the step may have ended the engine
                self._engine.stop_trace(None)
            raise
        if step in (self._begun + self._steps - 1, self._last):
            self._write(step)

    def _write(self, step: int) -> None:
        path = self._folder / f"steps-{self._begun:06d}-{step:06d}-rank-0.json.gz"
        self._steps = self._begun = 0
        try:
            self._engine.stop_trace(path)
        except (OSError, ResourceError) as error:  # training goes on
            self._tell("profile_failed", f"the trace cannot be written: {error}")
        else:
            self._tell("profile", f"{path} opens in {VIEWER}; phases are the spans named mmrl.*")
