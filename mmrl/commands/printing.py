"""Commands' output: answers to stdout, in JSON or as lines, complaints to stderr; neither holds a secret."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mmrl.errors import MMRLError

if TYPE_CHECKING:
    from mmrl.system.report import Report

POLICY = "policy"
"""The author of what the policy writes; its lines begin with this and a bar."""


def answer(
    data: Any,
    lines: Iterable[str],
    *,
    as_json: bool,
    ascii_only: bool = False,
    styled: Callable[[str], str] | None = None,
) -> None:
    """Print the data in JSON, or the lines with their control characters shown.

    Args:
        ascii_only: Write JSON in ASCII, for texts that a terminal may obey.
        styled: Gives a line its colour, on a terminal that may have colours.
    """
    from mmrl.system.redaction import Redactor

    if as_json:
        print_json(Redactor().plain(data), ascii_only=ascii_only)
        return
    shown = _shown("\n".join(lines))
    if styled is not None and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        shown = "\n".join(map(styled, shown.split("\n")))
    print(shown, flush=True)


def print_json(value: Any, *, ascii_only: bool = False) -> None:
    """Print the value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=ascii_only))


def tell(report: Report, *, as_json: bool) -> int:
    """Print a report, and its errors to stderr; returns its exit code. On a terminal, the policy's lines are green."""
    answer(report.complete(), report.text(), as_json=as_json, styled=_coloured)
    for error in report.errors:
        complain(error)
    return report.exit_code


def complain(error: MMRLError) -> None:
    """Print an error to stderr."""
    print_error(f"mmrl: {error}\n")


def warn(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        print_error(f"mmrl: warning: {warning}\n")


def note(text: str) -> None:
    """Print a sentence to stderr."""
    print_error(f"mmrl: {text}\n")


def print_error(text: str) -> None:
    """Print to stderr, if anybody reads it, with control characters shown."""
    with suppress(OSError):
        print(_shown(text), end="", file=sys.stderr)


def _coloured(line: str) -> str:
    return f"\x1b[32m{line}\x1b[0m" if line.lstrip().startswith(f"{POLICY} | ") else line


def _shown(text: str) -> str:
    from mmrl.system.console import visible
    from mmrl.system.redaction import Redactor

    return visible(Redactor()(text), keep="\n")
