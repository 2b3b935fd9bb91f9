"""The commands that run something: a config becomes objects, and the objects run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmrl.cluster.process import prepare_process
from mmrl.commands.check.examination import examine
from mmrl.commands.plan.forecast import Assumptions, forecast
from mmrl.commands.plan.proposal import least_memory
from mmrl.config.load import LoadedConfig
from mmrl.errors import MMRLError, PluginError
from mmrl.runs.directory import RunDirectory
from mmrl.runs.session import TrainingRun
from mmrl.system.report import Report
from mmrl.system.signals import Interruption, Stopped


def check(loaded: LoadedConfig) -> Report:
    """Check a config as far as that goes without a device: plugins, model files, every row, the rewards, the disk.

    Raises:
        MMRLError: The plugins do not fit the config; what else is wrong is in the report.
    """
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return examine(loaded.config, Path(folder))


def plan(loaded: LoadedConfig, assumptions: Assumptions) -> Report:
    """Tell what a run takes in memory and, if it is to be measured, in time.

    Raises:
        MMRLError: The config does not fit its plugins, model or data.
    """
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return forecast(loaded.config, Path(folder), assumptions)


def train(
    loaded: LoadedConfig,
    interruption: Interruption | None = None,
    *,
    resume: str = "auto",
    strict: bool = False,
    allowed: Sequence[str] = (),
    profiled_steps: int = 0,
    verbose: bool = False,
) -> int:
    """Run the config, or go on with the run that its directory holds; returns the exit code.

    Args:
        resume: ``auto`` goes on from the newest good checkpoint, ``never`` refuses a directory that holds a run; else
            the path of another run, or of a checkpoint of one, to begin a new run from; the same words go on with that.
        interruption: What signals do; by default what they did before.
        strict: Refuse to go on if the newest checkpoint is damaged, rather than from the one before.
        allowed: Keys whose change is no reason to refuse.
        profiled_steps: Steps to write a trace of, to RUN/profile.
        verbose: Show what the engines' libraries write.

    Raises:
        MMRLError: See the exit codes in ``mmrl.errors``; also noted in RUN/events.jsonl once there is one.
        Stopped: A signal ended the run; it can go on.
    """
    interruption = interruption or Interruption()
    prepare_process(verbose=verbose)
    source = None if resume in ("auto", "never") else Path(resume)
    directory = RunDirectory.create(loaded.config.trainer.run_dir, new=resume == "never", source=source)
    try:
        run = TrainingRun(
            loaded.config,
            directory,
            interruption,
            least_memory=least_memory,
            profiled_steps=profiled_steps,
            verbose=verbose,
        )
        if not run.find_start(resume, strict, allowed):
            return 0
        run.train()
    except MMRLError as error:
        details = error.details if isinstance(error, PluginError) else ""
        directory.event("error", message=str(error), exit_code=error.exit_code, details=details)
        if details:
            place = f"{directory.path / 'events.jsonl'} has the details"
            error.remedy = "; ".join(filter(None, [error.remedy, place]))
        raise
    except Stopped as stopped:
        directory.event("stopped", message=str(stopped), exit_code=stopped.exit_code)
        raise
    finally:
        directory.release()
    return 0
