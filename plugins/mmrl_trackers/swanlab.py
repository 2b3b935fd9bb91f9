"""SwanLab, offline unless asked: RUN/swanlog holds the run, ``swanlab sync`` uploads it later.

The mode ``cloud`` reads SwanLab's own login (``swanlab login`` or SWANLAB_API_KEY) and never asks for one. SwanLab's
snapshots of the machine, the command line, the packages and the git remote are off: RUN/environment.json has what a
run needs, without secrets in addresses.

A run that goes on keeps its id. In the mode ``cloud`` it goes on in the same experiment, and SwanLab refuses steps that
are logged again. Offline and local, each attempt is a folder of its own in
RUN/swanlog, named by that id; ``swanlab sync --id ID FOLDER`` for each of them, in order, makes them one experiment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmrl.interfaces import PluginConfig, RunFacts, ShownRollout
from mmrl.types import FloatArray
from mmrl_trackers.services import NumberedTracker, pictures_of, require, text_of

HISTOGRAM_BARS = 30


class SwanLab(NumberedTracker):
    """Every metric as a scalar, alarms as text, rollouts as text and pictures, histograms as bars; only values that are
    finite."""

    class Config(PluginConfig):
        mode: Literal["offline", "cloud", "local", "disabled"] = "offline"
        """offline: files only; cloud: upload while running; local: SwanLab's own dashboard; disabled: nothing."""
        project: str | None = None
        """SwanLab project; ``mmrl`` if not given."""
        experiment: str | None = None
        """Experiment name; the run directory's if not given."""

    def check(self, run: RunFacts) -> Sequence[str]:
        require("swanlab", "swanlab")
        return ()

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import swanlab

        probes = swanlab.Settings.Probe(
            hardware=False, runtime=False, requirements=False, git=False, swanlab=False, monitor=False
        )
        terminal = swanlab.Settings.Terminal(proxy_type="none")
        self._folder = run_dir / "swanlog"
        with self._notices():
            self._run = swanlab.init(
                mode=self.config.mode,
                project=self.config.project or "mmrl",
                name=self.config.experiment or run_dir.name,
                log_dir=str(self._folder),
                config=dict(config),
                id=self._id,
                resume="never" if self._id is None else "allow",
                settings=swanlab.Settings(interactive=False, terminal=terminal, probe=probes),
            )
        self._id = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def alarm(self, step: int, monitor: str, message: str) -> None:
        import swanlab

        self._run.log({f"alarm/{monitor}": swanlab.Text(message)}, step=step)

    def evaluation(self, step: int, rollouts: Sequence[ShownRollout], histograms: Mapping[str, FloatArray]) -> None:
        import swanlab
        from swanlab import echarts

        found: dict[str, Any] = {}
        for number, rollout in enumerate(rollouts, 1):
            found[f"rollout_{number}/text"] = swanlab.Text(text_of(rollout))
            if pictures := pictures_of(rollout):
                found[f"rollout_{number}/images"] = [swanlab.Image(picture) for picture in pictures]
        for name, values in histograms.items():
            if len(values):
                counts, edges = np.histogram(values, min(HISTOGRAM_BARS, len(np.unique(values))))
                chart = echarts.Bar().add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
                found[f"histogram/{name}"] = chart.add_yaxis(name, counts.tolist())
        self._run.log(found, step=step)

    def finish(self) -> None:
        with self._notices():
            self._run.finish()

    @contextmanager
    def _notices(self) -> Iterator[None]:
        """Send SwanLab's prints to swanlog/notices.txt, unless the run is verbose; the cloud's address is shown."""
        if self.config.mode == "cloud" or os.environ.get("MMRL_VERBOSE") == "1":
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "notices.txt").open("a", encoding="utf-8") as file, redirect_stdout(file):
            yield
