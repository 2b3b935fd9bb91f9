"""``mmrl report``: writes runs as one HTML file, which opens from the disk without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.commands.printing import answer
from mmrl.errors import ConfigError

_MAX_MB = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mmrl report RUN... [-o FILE] [--step N]... [--max-mb MB]"
    parser.description = "Write runs as one HTML file that opens from the disk, offline: the viewer's page with its "
    parser.description += "data inside. It holds what fits, and says what it leaves out."
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a sweep's for all its runs"
    )
    text = "the file to write (default: report.html); an earlier report is replaced"
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help=text)
    text = "show the rollouts of this step, or of A-B; repeat for more; by default the first, the last and some between"
    parser.add_argument("--step", action="append", default=[], metavar="N", help=text)
    text = f"the most millions of bytes that the file may have (default: {_MAX_MB:g})"
    parser.add_argument("--max-mb", type=float, default=_MAX_MB, metavar="MB", help=text)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.commands.arguments import chosen_steps
    from mmrl.runs.files import replace_file
    from mmrl.viewer.folder import viewed_runs
    from mmrl.viewer.report import is_report, make_report

    if not 0 < arguments.max_mb <= 1000:
        raise ConfigError(f"{arguments.max_mb:g} is no size of a report", where="--max-mb", possible="above 0, to 1000")
    output = arguments.output.expanduser()
    if (output.exists() and not output.is_file()) or not output.absolute().parent.is_dir():
        raise ConfigError(f"{output} cannot be a file", where="--output", remedy="name a file in a folder that exists")
    if output.exists() and not is_report(output):
        raise ConfigError(f"{output} is a file that is no report", where="--output", remedy="name another file")
    steps = None
    if arguments.step:
        known = sorted({step for each in viewed_runs(arguments.runs) for step in each.files("step")})
        steps = chosen_steps(arguments.step, known, ", ".join(map(str, arguments.runs)))
    report = make_report(arguments.runs, steps, arguments.max_mb)
    text = report.html()
    replace_file(output, text)
    left = [f"it leaves out: {each}" for each in report.left_out]
    answer(None, [f"{output}: {len(text.encode()) / 1e6:.1f} MB", *left], as_json=False)
    return 0
