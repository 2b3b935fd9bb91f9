"""Scalars for TensorBoard in RUN/tensorboard; look at them with ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.interfaces import Tracker


class TensorBoard(Tracker):
    """Every metric as a scalar of its own name; values that are not finite are left out."""

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()
