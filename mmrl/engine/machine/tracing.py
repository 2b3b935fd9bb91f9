"""A trace of this process and its device, in Chrome's format."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mmrl.engine.device import DeviceKind

LABEL = "mmrl."
"""Prefix of the names of spans in a trace."""


class Tracer:
    """torch's profiler, which runs between ``start`` and ``stop``."""

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind
        self._running: Any = None

    def start(self) -> None:
        """Begin to record."""
        from torch.profiler import ProfilerActivity, profile

        devices = [ProfilerActivity.CUDA] if self._kind == "cuda" else []
        self._running = profile(activities=[ProfilerActivity.CPU, *devices], record_shapes=True, acc_events=True)
        self._running.start()

    def stop(self, path: Path | None) -> None:
        """End the recording, and write it to a ``.json.gz``; None drops it. Nothing happens without a recording.

        Raises:
            OSError: It cannot be written.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part-{path.name}")
            running.export_chrome_trace(str(part))
            os.replace(part, path)

    def span(self, name: str) -> AbstractContextManager[object]:
        """Marks a block in the trace, if one is recorded."""
        if self._running is None:
            return nullcontext()
        from torch.profiler import record_function

        return record_function(LABEL + name)
