"""``mmrl replay``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.set_defaults(overrides=[])
    parser.usage = "mmrl replay RUN [--step N]... [--json] [--no-environment] [--config FILE]... [section.key=VALUE]..."
    parser.description = (
        "Score a step's rollouts again, and recompute selection, advantages, loss and metrics from the run's record, "
        "without the policy, and play recorded turns again in its environment; exit code 6 where anything differs. "
        "With other rewards or another algorithm: "
        "what they would have changed."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder")
    text = "which step, or A-B; repeat for more; by default the newest that was finished and not undone"
    parser.add_argument("--step", action="append", default=[], metavar="N", help=text)
    text = "do not play recorded turns again"
    parser.add_argument("--no-environment", action="store_true", help=text)
    text = "what if: rewards and algorithm of this config (over the run's), as of the overrides"
    parser.add_argument("--config", action="append", default=[], type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.cluster.process import prepare_process

    prepare_process()
    from mmrl.commands.replay.recorded_run import RecordedRun
    from mmrl.commands.replay.replay import replay

    recorded = RecordedRun.open(arguments.run_dir)
    reports = []
    steps, plays = recorded.choose(arguments.step), not arguments.no_environment
    for report in replay(recorded, steps, arguments.config, arguments.overrides, with_environment=plays):
        reports.append(report)
        if not arguments.json:
            answer(None, report.lines(), as_json=False)
    differs = any(report.differs for report in reports)
    if arguments.json:
        found = {"differs": differs, "steps": [report.data() for report in reports]}
        answer(found, (), as_json=True, ascii_only=True)
    return 6 if differs else 0
