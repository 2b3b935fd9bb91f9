"""Scalars for TensorBoard in RUN/tensorboard; look at them with ``tensorboard --logdir RUN/tensorboard``.

A run that goes on adds a file, and says from which step on the earlier ones are undone. TensorBoard hides those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.interfaces import Tracker


class TensorBoard(Tracker):
    """Every metric as a scalar of its own name, alarms as text; values that are not finite are left out."""

    _writer: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._folder = run_dir / "tensorboard"
        self._folder.mkdir(exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._opened(step)
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)
        writer.flush()

    def alarm(self, step: int, monitor: str, message: str) -> None:
        self._opened(step).add_text(f"alarm/{monitor}", message, step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:  # only the first step tells where the run goes on
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        return self._writer
