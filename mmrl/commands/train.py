"""``mmrl train``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.arguments import add_config, load
from mmrl.commands.printing import print_error, tell
from mmrl.errors import MMRLError, PluginError
from mmrl.system.signals import Interruption, Stopped

if TYPE_CHECKING:
    from mmrl.config.load import LoadedConfig

_PROFILED = 2
"""Steps that --profile traces by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="stop before the first model is loaded")
    text = "auto (the default): go on with the run in trainer.run_dir, if there is one; never: refuse to; a path of "
    text += "another run or of a checkpoint: begin a new run from there"
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help=text)
    text = "do not go on from an earlier checkpoint if the newest is damaged"
    parser.add_argument("--strict-resume", action="store_true", help=text)
    text = "go on though this key has changed since the checkpoint; repeat for more"
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=text)
    text = "show what the engines' libraries write; without it, RUN/engines.log has what they write while they start"
    parser.add_argument("--verbose", action="store_true", help=text)
    text = f"write a trace of rank 0 to RUN/profile, for Perfetto: of {_PROFILED} steps, or of STEPS"
    parser.add_argument("--profile", type=_steps, default=0, metavar="STEPS", help=text)


def complete(words: Sequence[str]) -> list[str]:
    """Fill in the number of ``--profile`` where it is left out; argparse would take the next word for it."""
    return [f"{a}={_PROFILED}" if a == "--profile" and not b.isdecimal() else a for a, b in pairwise([*words, ""])]


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps, 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        from mmrl.commands.check.command import check

        return tell(check(load(arguments)), as_json=False)
    loaded: LoadedConfig | None = None
    try:
        with Interruption() as interruption:
            loaded = load(arguments)
            return train(
                loaded,
                interruption,
                resume=arguments.resume,
                strict=arguments.strict_resume,
                allowed=arguments.allow_change,
                profiled_steps=arguments.profile,
                verbose=arguments.verbose,
            )
    except Stopped as stopped:
        goes_on = "--resume auto goes on" if arguments.resume == "never" else "the same command goes on"
        if loaded is not None and loaded.config.trainer.save_optimizer == "none":
            goes_on = "the run cannot go on (trainer.save_optimizer is none)"
        print_error(f"mmrl: {stopped}; {goes_on}\n")
        return stopped.exit_code


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
            the path of another run, or of a checkpoint of one, to begin a new run from; the same path goes on with it.
        interruption: Handles signals; by default their handlers stay.
        strict: Refuse to go on if the newest checkpoint is damaged; else the one before is used.
        allowed: Keys whose values may have changed.
        profiled_steps: Steps to write a trace of, to RUN/profile.
        verbose: Show what the engines' libraries write.

    Raises:
        MMRLError: See the exit codes in ``mmrl.errors``; also noted in RUN/events.jsonl once there is one.
        Stopped: A signal ended the run; it can go on.
    """
    from mmrl.cluster.process import prepare_process
    from mmrl.runs.directory import RunDirectory
    from mmrl.runs.session import TrainingRun
    from mmrl.runs.start import Starts

    interruption = interruption or Interruption()
    prepare_process(verbose=verbose)
    begins_from = None if resume in ("auto", "never") else Path(resume)
    directory = RunDirectory.create(loaded.config.trainer.run_dir, new=resume == "never", begins_from=begins_from)
    try:
        starts = Starts(loaded.config, directory)
        if (start := starts.find(resume, allowed, strict=strict)) is None:
            return 0
        run = TrainingRun(
            start,
            starts,
            directory,
            interruption,
            profiled_steps=profiled_steps,
            verbose=verbose,
            origins=loaded.origins,
        )
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
