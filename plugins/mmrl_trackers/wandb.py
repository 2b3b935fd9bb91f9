"""Weights & Biases, offline unless asked: RUN/wandb holds the run, ``wandb sync RUN/wandb/offline-run-*`` uploads it.

The mode ``online`` reads W&B's own login (``wandb login`` or WANDB_API_KEY) and never asks for one. Snapshots of the
machine, its packages, the git repository, code, console and system metrics are off: RUN/environment.json has what a
run needs, without secrets in addresses.

A run that goes on keeps its id, and so its place. W&B takes no step twice: those after the checkpoint stay as they were
first logged. Offline each attempt is a folder of its own, and syncing them in order joins them.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmrl.errors import PluginError
from mmrl.interfaces import PluginConfig, RunFacts, ShownRollout
from mmrl.types import FloatArray
from mmrl_trackers.services import NumberedTracker, pictures_of, require, text_of


class WandB(NumberedTracker):
    """Every metric as a scalar, alarms as W&B's, rollouts as a table; only values that are finite."""

    class Config(PluginConfig):
        mode: Literal["offline", "online", "disabled"] = "offline"
        """offline: files only; online: upload while running; disabled: nothing."""
        project: str | None = None
        """W&B project; if not given WANDB_PROJECT, else ``mmrl``."""
        entity: str | None = None
        """Team or user; the login's own if not given."""
        experiment: str | None = None
        """The run's name; the run directory's if not given."""
        group: str | None = None
        """W&B group, for runs that belong together."""
        tags: tuple[str, ...] = ()
        """W&B tags."""

    def check(self, run: RunFacts) -> Sequence[str]:
        require("wandb", "wandb")
        return ()

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        options, hook = self.config, sys.excepthook
        run_id = self._id or secrets.token_hex(4)  # not WANDB_RUN_ID's, which several runs may have
        if options.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise PluginError("W&B has no login", where="mode: online", remedy="set WANDB_API_KEY, or: wandb login")
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            host="",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            mode=options.mode,
            project=options.project or os.environ.get("WANDB_PROJECT") or "mmrl",
            entity=options.entity,
            name=options.experiment or run_dir.name,
            group=options.group,
            tags=options.tags,
            dir=str(run_dir),
            config=dict(config),
            id=run_id,
            resume=None if self._id is None else "allow",
            settings=settings,
        )
        sys.excepthook = hook  # W&B's would tell it of an error that ends this process
        self._id = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def alarm(self, step: int, monitor: str, message: str) -> None:
        self._run.alert(title=f"{monitor}, step {step}", text=message)

    def evaluation(self, step: int, rollouts: Sequence[ShownRollout], histograms: Mapping[str, FloatArray]) -> None:
        import wandb

        found: dict[str, Any] = {"rollouts": wandb.Table(["rollout", "reward", "text"])}
        for number, rollout in enumerate(rollouts, 1):
            found["rollouts"].add_data(number, rollout.reward, text_of(rollout))
            if pictures := pictures_of(rollout):
                found[f"rollout_{number}/images"] = [wandb.Image(picture) for picture in pictures]
        found |= {f"histogram/{name}": wandb.Histogram(values) for name, values in histograms.items() if len(values)}
        self._run.log(found, step=step)

    def finish(self) -> None:
        self._run.finish()
