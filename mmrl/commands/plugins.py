"""``mmrl plugins``: the installed plugins, and whether each can be used."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, cast

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import print_json
from mmrl.errors import ConfigError
from mmrl.system.table import column_widths, line

if TYPE_CHECKING:
    from mmrl.config.plugin_specs import Kind

_COLUMNS = ("kind", "name", "distribution", "version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    kinds = "algorithm, reward, dataset, environment, tracker and monitor"
    text = f"try each, or those named, on the checks of mmrl.testing; kinds are {kinds}"
    parser.add_argument("--check", nargs="*", metavar="KIND:NAME", help=text)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.plugin_host.registry import list_plugins, locate

    everything = list_plugins()
    seats = Counter((info.kind, info.name) for info in everything)
    wanted = [locate(*kind_and_name(word, "mmrl plugins", "--check")) for word in arguments.check or ()]
    infos = list(dict.fromkeys(wanted)) or everything
    verdicts: Iterator[tuple[str, str]] = repeat(("installed", ""))
    if arguments.check is not None:
        from mmrl.testing.installed import examine

        verdicts = examine(infos)
    cells = [_COLUMNS, *([getattr(info, name) for name in _COLUMNS] for info in infos)]
    widths = [*column_widths(cells), 0]
    if not arguments.json:
        print(line([*_COLUMNS, "status"], widths))
    rows = []
    for (status, note), info in zip(verdicts, infos, strict=False):  # verdicts may be endless
        if seats[info.kind, info.name] > 1:
            note = "; ".join(filter(None, [f"name taken twice, use {info.distribution}:{info.name}", note]))
        rows.append({**dataclasses.asdict(info), "status": status, "note": note})
        if not arguments.json:
            shown = ": ".join([status, *note.splitlines()[:1]])
            print(line([*(rows[-1][name] for name in _COLUMNS), shown], widths), flush=True)  # as soon as it is known
    bad = [row for row in rows if row["status"] == "bad"]
    if arguments.json:
        print_json(rows)
    else:
        for row in bad:
            print(f"\nmmrl: {row['note']}", file=sys.stderr)
    return 4 if bad else 0


def kind_and_name(word: str, command: str, option: str) -> tuple[Kind, str]:
    """The parts of a word such as ``reward:exact``.

    Raises:
        ConfigError: The word is no such pair.
    """
    from mmrl.plugin_host.registry import INTERFACES

    kind, _, name = word.partition(":")
    if kind not in INTERFACES or not name:
        kinds = ", ".join(f"{known}:NAME" for known in INTERFACES)
        raise ConfigError(f"{option} cannot be {word!r}", where=command, possible=kinds)
    return cast("Kind", kind), name
