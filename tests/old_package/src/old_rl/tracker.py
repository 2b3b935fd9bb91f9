"""A line for each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.interfaces import PluginConfig, Tracker


class OldLines(Tracker):
    class Config(PluginConfig):
        pass

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._file = (run_dir / "lines.txt").open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(step, metrics.get("reward/mean"), file=self._file, flush=True)

    def finish(self) -> None:
        self._file.close()
