"""The place where a run begins or goes on: at its first step, or after a checkpoint with what has changed since."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.sections import Config
from mmrl.errors import ConfigError, plural
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, Checkpoints, find
from mmrl.runs.directory import RunDirectory
from mmrl.runs.history import metrics_of
from mmrl.runs.recorder import BATCH_STATES, RUN_STATE, best_scores, prune, tell
from mmrl.runs.resumption import Change, changed_config, changed_contents, plain_config, refuse
from mmrl.runs.setup import RunSetup
from mmrl.runs.summary import way_on
from mmrl.step.slots import BATCHES, REACHED
from mmrl.system.console import Console


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint to go on from.

    Attributes:
        state: Its run's record, a step's metrics and the trainer's state among it.
        is_another: True if that is another run, from whose checkpoint this one begins.
    """

    checkpoint: Checkpoint
    state: Mapping[str, Any]
    is_another: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint, *, is_another: bool) -> SavedRun:
        """Raises CheckpointError if the run's record is not whole."""
        state = checkpoint.read_state(RUN_STATE)
        if missing := {"attempt", "config", "fingerprints", "trainer", "metrics"} - {*state}:
            raise CheckpointError(
                f"the checkpoint's {RUN_STATE} lacks {', '.join(sorted(missing))}", where=str(checkpoint.path)
            )
        if batches := sorted(checkpoint.state.glob(BATCH_STATES.replace("{:06d}", "*"))):
            state["trainer"][BATCHES] = batches
        return cls(checkpoint, state, is_another)

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def logged(self, directory: RunDirectory) -> dict[str, Any] | None:
        """The step's line in metrics.jsonl, unless it is of an attempt that was undone."""
        return directory.logged(self.step, self.state["attempt"])

    def unlogged_metrics(self, config: Config, directory: RunDirectory) -> Mapping[str, float] | None:
        """The step's metrics, if its evaluation or its line in metrics.jsonl is missing."""
        logged = self.logged(directory)
        is_due = bool(config.evaluations) and config.trainer.evaluates(self.step)
        is_evaluated = logged is not None and any(name.startswith("eval/") for name in logged)
        if logged is not None and (is_evaluated or not is_due):
            return None
        values: Mapping[str, float | None] = self.state["metrics"] or metrics_of(logged)
        return {name: math.nan if value is None else value for name, value in values.items()}

    def why_anew(self, changes: Sequence[Change]) -> str:
        """The reason not to go on from a checkpoint before the first step; empty if there is none."""
        if any(change.matters for change in changes):
            return "the config has changed"
        return "" if self.checkpoint.has_optimizer else "the checkpoint has no optimizer state"


@dataclass(frozen=True, slots=True)
class Start:
    """The place where a run begins or goes on; ``str`` is for a person.

    Attributes:
        setup: The run's setup. Training rows are read as a checkpoint's run reads them.
        saved: The checkpoint to go on from; None for a new run.
        changes: Changes since then of the config, and of files that its paths lead to.
    """

    setup: RunSetup
    saved: SavedRun | None = None
    changes: Sequence[Change] = ()

    def __str__(self) -> str:
        if self.saved is None:
            return "new"
        if self.saved.is_another:
            return f"begins from {self.saved.checkpoint.path}"
        return f"goes on after step {self.saved.step}"

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint."""
        return None if self.saved is None else self.saved.checkpoint.path

    @property
    def trackers(self) -> Sequence[Mapping[str, Any]]:
        """Names and states of the trackers that are to write on."""
        return () if self.saved is None or self.saved.is_another else self.saved.state.get("trackers", ())

    def record(self) -> dict[str, Any]:
        """The fields of an attempt's event."""
        place = None if self.checkpoint is None else str(self.checkpoint)
        is_another = self.saved is not None and self.saved.is_another
        return {
            "checkpoint": place,
            "source": place if is_another else None,
            "command": sys.argv,
            "changes": [str(change) for change in self.changes],
        }


class Starts:
    """Finds the place where a run begins, and the one to which it goes back.

    Args:
        config: The config as it was given.
    """

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self._checkpoints = Checkpoints(directory.checkpoints)
        self._console = Console(config.trainer.steps)

    def find(self, resume: str, allowed: Sequence[str], *, strict: bool) -> Start | None:
        """The place where the run begins; None if it is finished, as the console then says.

        Args:
            resume: ``auto``, ``never``, or the path of another run or of a checkpoint of one.
            allowed: Keys whose values may have changed.
            strict: Refuse a damaged newest checkpoint; else the one before it is taken.

        Raises:
            CheckpointError: All checkpoints are damaged, or the newest one with ``strict``.
            ConfigError: A change since then is not allowed, or steps were finished and no checkpoint is left.
            MMRLError: ``trainer.epochs`` is set, and the rows that it counts cannot be used.
        """
        self._checkpoints.clean()
        resume = self._resolve(resume)
        if (saved := self._saved(resume, strict=strict)) is None:
            return self._new()
        setup = self._set_up(scans=REACHED not in saved.state["trainer"])
        changes = changed_config(saved.state["config"], plain_config(setup.config))
        if resume == "auto":
            self._set_aside_after(saved.step)
            if saved.step == 0 and not self._directory.has_steps and (why := saved.why_anew(changes)):
                self._tell("start_anew", message=f"{why}, and no step was finished yet")
                self._directory.start_anew()
                return self._new()
            if self._is_over(saved, setup, changes):
                self._prune(saved, setup)
                return None
        saved.checkpoint.require_optimizer()
        self._check(changes, saved, allowed)
        others = changed_contents(saved.state["fingerprints"], setup.fingerprints)
        self._check(others, saved, allowed)
        if resume == "auto":
            self._prune(saved, setup)  # a killed process may not have done it
        return Start(setup, saved, [*changes, *others])

    def go_back(self, start: Start) -> Start:
        """The last checkpoint of the run, or the one of another run that it began from."""
        newest = self._checkpoints.newest(self._report_damage)
        began_from = start.saved.checkpoint if start.saved is not None and start.saved.is_another else None
        checkpoint = newest or began_from
        if checkpoint is None:
            return replace(start, saved=None)
        checkpoint.require_optimizer()
        saved = SavedRun.read(checkpoint, is_another=newest is None)
        self._set_aside_after(saved.step)
        return replace(start, saved=saved)

    def _resolve(self, resume: str) -> str:
        """``auto`` if the run has already begun from the path ``resume``, else ``resume`` as it is."""
        has_begun, begun_from = bool(self._checkpoints.all()), self._directory.begun_from
        if resume == "auto" and begun_from is not None and not has_begun:
            raise ConfigError(
                "the run was to begin from a checkpoint of another one, and ended before it did",
                where=f"trainer.run_dir: {self._directory.path}",
                remedy=f"begin it again with --resume {begun_from}, or choose another trainer.run_dir",
            )
        if resume in ("auto", "never"):
            return resume
        if has_begun:
            return "auto"
        self._directory.start_anew()
        return resume

    def _saved(self, resume: str, *, strict: bool) -> SavedRun | None:
        """The checkpoint to go on from; None for a new run."""

        def report(damaged: Checkpoint, error: CheckpointError) -> None:
            if strict:
                error.remedy = "leave out --strict-resume to go on from the checkpoint before it"
                raise error
            self._report_damage(damaged, error)

        if resume == "never":
            return None
        if resume != "auto":
            return SavedRun.read(find(Path(resume), report), is_another=True)
        if (newest := self._checkpoints.newest(report)) is not None:
            return SavedRun.read(newest, is_another=False)
        if self._directory.has_steps:
            raise ConfigError(
                "the run has finished steps, and no checkpoint to go on from",
                where=f"trainer.run_dir: {self._directory.path}",
                remedy="put a checkpoint back, choose another trainer.run_dir, or move the folder away",
            )
        return None

    def _new(self) -> Start:
        return Start(self._set_up(scans=None))

    def _set_up(self, *, scans: bool | None) -> RunSetup:
        """The setup of the config as it was given, its steps counted."""
        setup = RunSetup(self._config, self._directory.media, scans=scans)
        setup.count_steps()
        return setup

    def _is_over(self, saved: SavedRun, setup: RunSetup, changes: Sequence[Change]) -> bool:
        """True if no step is left, or ``trainer.stop_when`` is fulfilled; the console then says so."""
        trainer, path = setup.config.trainer, self._directory.path
        if saved.unlogged_metrics(setup.config, self._directory) is not None:
            return False
        values = saved.logged(self._directory) or {}
        if saved.step >= trainer.steps:
            way = f"To go on, {way_on(setup.config, {saved.step: values}, saved.step, setup.length)}"
            if not saved.checkpoint.has_optimizer:
                way = "It cannot go on without its optimizer's state"
            self._console.line(
                f"{path} is finished: it has {plural(saved.step, 'step')}; nothing was done. {way}; to train anew, "
                "choose another trainer.run_dir"
            )
            self._console.lines([f"changed, without effect: {change}" for change in changes])
            return True
        condition = trainer.stop_condition
        if condition is None or not condition.holds(values):
            return False
        told = f"{path} has ended after step {saved.step} by trainer.stop_when: {condition.told(values)}"
        self._console.line(f"{told}; change trainer.stop_when to go on")
        return True

    def _check(self, changes: Sequence[Change], saved: SavedRun, allowed: Sequence[str]) -> None:
        """Tell of changes, and refuse those that are not allowed."""
        self._console.lines([f"changed: {change}" for change in changes])
        refuse(changes, allowed, str(saved.checkpoint.path))

    def _set_aside_after(self, step: int) -> None:
        """Set aside later checkpoints, which are damaged, else they would count among the newest that are kept."""
        for later in self._checkpoints.all():
            if later.step > step:
                self._checkpoints.set_aside(later)

    def _prune(self, saved: SavedRun, setup: RunSetup) -> None:
        prune(setup.config, self._directory, best_scores(setup.config, self._directory, saved.step))

    def _report_damage(self, damaged: Checkpoint, error: CheckpointError) -> None:
        self._tell("checkpoint_damaged", message=str(error), step=damaged.step)

    def _tell(self, kind: str, **fields: Any) -> None:
        tell(self._directory, self._console, kind, **fields)
