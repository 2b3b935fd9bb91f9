"""A run for TensorBoard in RUN/tensorboard; ``tensorboard --logdir RUN/tensorboard`` shows it.

A run that goes on adds a file, and says from which step on the earlier ones are undone. TensorBoard hides those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.interfaces import ShownRollout, Tracker
from mmrl.types import FloatArray
from mmrl_trackers.services import pictures_of, text_of


class TensorBoard(Tracker):
    """Every metric as a scalar, alarms as text, rollouts as text and pictures; only values that are finite."""

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

    def evaluation(self, step: int, rollouts: Sequence[ShownRollout], histograms: Mapping[str, FloatArray]) -> None:
        writer = self._opened(step)
        for number, rollout in enumerate(rollouts, 1):
            literal = "\n".join(f"    {line}" for line in text_of(rollout).splitlines())  # it would be Markdown
            writer.add_text(f"rollout_{number}", literal, step)
            for index, picture in enumerate(pictures_of(rollout), 1):
                writer.add_image(f"rollout_{number}/image_{index}", np.asarray(picture), step, dataformats="HWC")
        for name, values in histograms.items():
            if len(values):
                writer.add_histogram(f"histogram/{name}", values, step)
        writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:  # only the first step tells where the run goes on
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        return self._writer
