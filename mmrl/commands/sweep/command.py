"""``mmrl sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.arguments import add_config, add_json
from mmrl.commands.printing import answer, print_error, warn
from mmrl.errors import ConfigError, MMRLError, error_class, plural
from mmrl.system.signals import Interruption, Stopped

if TYPE_CHECKING:
    from mmrl.commands.sweep.machines import Machine
    from mmrl.commands.sweep.plan import SweepPlan
    from mmrl.commands.sweep.schedule import Failure
    from mmrl.config.yaml_tree import Located

_USAGE = "mmrl sweep CONFIG... key=VALUE,VALUE... [--seeds 0,1,2] [--parallel N] | --show SWEEP [--metric NAME]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    add_json(parser)
    parser.usage = _USAGE
    parser.description = "Run a config with each combination of values and each seed, one run folder for each. The "
    parser.description += "same command goes on where it was, and takes further values and seeds in."
    parser.add_argument("--seeds", metavar="N,N", help="values of trainer.seed, such as 0,1,2 or 0-4")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once, through Ray (default: 1)")
    text = "the folder of the sweep (default: trainer.run_dir with -sweep after it)"
    parser.add_argument("--folder", type=Path, metavar="SWEEP", help=text)
    text = "a Ray cluster, such as auto or HOST:PORT (default: cluster.address, else one on this machine)"
    parser.add_argument("--address", metavar="ADDRESS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="check all points, list them and stop")
    parser.add_argument(
        "--show",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="SWEEP",
        help="print the table of a sweep, live or done, and stop",
    )
    text = "the metric of the table (default: trainer.best_metric, else the last evaluation's accuracy)"
    parser.add_argument("--metric", default="", metavar="NAME", help=text)
    parser.add_argument("--min", action="store_true", help="less of --metric is better")


def run(arguments: argparse.Namespace) -> int:
    if "show" in arguments:
        return _show(arguments)
    if not arguments.config:
        raise ConfigError("there is no config", where="mmrl sweep", possible=_USAGE)
    for name, given in (("--json", arguments.json), ("--metric", arguments.metric), ("--min", arguments.min)):
        if given:
            raise ConfigError(f"{name} is for --show", where=name, possible="mmrl sweep --show SWEEP")
    try:
        with Interruption("the runs end") as interruption:
            failures = sweep(
                arguments.config,
                arguments.overrides,
                interruption,
                seeds=arguments.seeds,
                parallel=arguments.parallel,
                folder=arguments.folder,
                address=arguments.address,
                is_dry=arguments.dry_run,
            )
    except Stopped as stopped:
        print_error(f"mmrl: {stopped}; the same command goes on\n")
        return stopped.exit_code
    raise_for(failures)
    return 0


def raise_for(failures: Sequence[Failure]) -> None:
    """Raise an error that tells of all failures, if there are any.

    Raises:
        MMRLError: The failures; its class is that of the runs' errors if they have one exit code.
    """
    if failures:
        from mmrl.commands.sweep.schedule import told_failures

        codes = {failure.ended.exit_code for failure in failures}
        kind = error_class(codes.pop()) if len(codes) == 1 else MMRLError
        raise kind("\n".join(told_failures(failures)), remedy="the same command tries them again")


def sweep(
    paths: Sequence[Path | Located],
    words: Sequence[str],
    interruption: Interruption | None = None,
    *,
    seeds: str | None = None,
    parallel: int = 1,
    folder: Path | None = None,
    address: str | None = None,
    is_dry: bool = False,
) -> Sequence[Failure]:
    """Run all points of a sweep that are not done, and print its table; returns the points that failed.

    Args:
        paths: The config's files or values.
        words: Axes and overrides, such as ``learner.lr=1e-5,3e-5``.
        interruption: Handles signals; by default their handlers stay.
        seeds: Such as ``0,1,2``; None for the config's.
        parallel: Runs at once; more than 1 are run through Ray.
        folder: SWEEP; by default the config's run folder with ``-sweep`` after it.
        address: A Ray cluster; None for the config's, or one on this machine.
        is_dry: Only check the points and list them.

    Raises:
        MMRLError: A point's config is wrong, or the folder cannot be taken; then nothing was started.
        Stopped: A signal ended the sweep; it can go on.
    """
    from mmrl.commands.sweep.grammar import read_words
    from mmrl.commands.sweep.plan import plan_sweep
    from mmrl.runs.files import locked

    if parallel < 1:
        raise ConfigError(f"{parallel} runs cannot be at work at once", where="--parallel", possible="1 or more")
    plan = plan_sweep(paths, read_words(words, seeds), folder)
    warn(plan.warnings)
    if is_dry:
        answer(None, [*_opening(plan), *(f"  {point.name}" for point in plan.points)], as_json=False)
        return ()
    plan.make_folder()
    with locked(plan.folder, "--folder"):
        plan.check_folder()  # another sweep may have been here since
        plan.write()
        return _run(plan, interruption or Interruption(), parallel, address)


def _run(plan: SweepPlan, interruption: Interruption, parallel: int, address: str | None) -> Sequence[Failure]:
    from mmrl.commands.sweep.schedule import Schedule, left_of
    from mmrl.runs.sweeps import load_sweep
    from mmrl.system.console import Console

    console = Console(0)
    console.lines(_opening(plan))
    failures: Sequence[Failure] = ()
    if left_of(plan):
        machine = _machine(plan, parallel, address)
        try:
            interruption.renew()  # Ray takes signals over
            console.lines(machine.lines())
            with interruption.deferred():
                failures = Schedule(plan, machine, interruption, console.line).run()
        finally:
            machine.close()
        interruption.check()
    console.lines(["", *load_sweep(plan.folder).table().lines(), "", *_closing(plan)])
    return failures


def _machine(plan: SweepPlan, parallel: int, address: str | None) -> Machine:
    """Where the runs are at work."""
    from mmrl.commands.sweep.machines import Cluster, Machine
    from mmrl.commands.sweep.schedule import errand_of, left_of

    addresses = {point.loaded.config.cluster.address for point in plan.points}
    if address is None and parallel > 1 and len(addresses) == 1:
        (address,) = addresses
    if parallel == 1 and address is None:
        return Machine()
    errands = [errand_of(plan, point) for point in left_of(plan)]
    return Cluster(address, parallel, errands, plan.folder)


def _opening(plan: SweepPlan) -> list[str]:
    from mmrl.commands.sweep.schedule import left_of

    settings = len(plan.points) // len(plan.seeds)
    done = len(plan.points) - len(left_of(plan))
    size = f"{plural(len(plan.points), 'run')}: {plural(settings, 'setting')} x {plural(len(plan.seeds), 'seed')}"
    return [
        f"sweep      {plan.folder}",
        f"           {size}; {done} done, {len(plan.points) - done} to run",
        f"consoles   {plan.logs}",
        "Ctrl-C     the runs at work save a checkpoint and stop; the same command goes on",
    ]


def _closing(plan: SweepPlan) -> list[str]:
    return [f"next       mmrl sweep --show {plan.folder}", f"           mmrl view {plan.folder}"]


def _show(arguments: argparse.Namespace) -> int:
    from mmrl.runs.sweeps import load_sweep

    given = [word for word in (*map(str, arguments.config), *arguments.overrides, arguments.seeds) if word]
    if given:
        raise ConfigError(f"--show takes no {given[0]}", where="mmrl sweep --show", possible="--metric, --min, --json")
    table = load_sweep(arguments.show).table(arguments.metric, is_min=arguments.min)
    answer({"sweep": str(arguments.show), **table.data()}, table.lines(), as_json=arguments.json)
    return 0
