"""A check's finding, and the table that goes into a bug report: aligned, without secrets and people's names."""

from __future__ import annotations

import dataclasses
import getpass
import re
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmrl.errors import NumericsError, ResourceError
from mmrl.system.console import visible
from mmrl.system.redaction import Redactor
from mmrl.system.table import GAP
from mmrl.system.table import table as layout

Area = Literal["versions", "devices", "machine", "settings", "nodes", "engine", "numbers"]
Status = Literal["ok", "warn", "bad"]

REPORT = "put this table into a bug report"

_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Finding:
    """One row.

    Attributes:
        area: The part of the table; ``numbers`` are comparisons of the self-test.
        check: The check's name.
        found: The finding.
        remedy: The next thing to do; empty if there is none.
        number: The number of a probe of the audit; None for what is no probe.
        bound: The probe's bound.
        is_least: True if the number must exceed the bound; else it may not.
        finds: The faults that the probe would have found.
    """

    area: Area
    check: str
    status: Status
    found: str
    remedy: str = ""
    number: float | None = None
    bound: float | None = None
    is_least: bool = False
    finds: str = ""

    def shown(self, private: Private) -> Finding:
        """The row as it may be shown."""
        return dataclasses.replace(
            self, check=private(self.check), found=private(self.found), remedy=private(self.remedy)
        )


class Private:
    """Removes secrets, home folders, and the user's name in words with a slash, from texts.

    Args:
        environ: Its secrets are removed; by default this process's.
    """

    def __init__(
        self, home: str | None = None, user: str | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        home = str(Path("~").expanduser()) if home is None else home
        user = _user() if user is None else user
        self._redact = Redactor(environ)
        home = home.rstrip("/") if home.strip("/~") else "(none)"
        self._home = re.compile(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])")
        self._user = re.compile(rf"(?<![A-Za-z0-9\[]){re.escape(user or '(none)')}(?![A-Za-z0-9])")

    def __call__(self, text: str) -> str:
        text = self._home.sub("~", self._redact(text))
        text = re.sub(r"(?<=/home/)[^/\s'\":]+|(?<=/Users/)[^/\s'\":]+", "[user]", text)
        text = re.sub(r"\S*/\S*", lambda word: self._user.sub("[user]", word[0]), text)
        return visible(text, keep="\n")


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing is bad, 6 if numbers disagree, else 5."""
    bad = {finding.area for finding in findings if finding.status == "bad"}
    if not bad:
        return 0
    return NumericsError.exit_code if "numbers" in bad else ResourceError.exit_code


def table(findings: Sequence[Finding]) -> list[str]:
    """The rows' lines: status, area, check, found; beneath, what a probe finds, and the remedy after an arrow."""
    heads = layout([(finding.status, finding.area, finding.check) for finding in findings])
    indent = max(map(len, heads), default=0) + len(GAP)
    lines: list[str] = []
    for finding, head in zip(findings, heads, strict=True):
        lines += _wrapped(finding.found or "-", head.ljust(indent), " " * indent)
        lines += _wrapped(finding.finds, " " * indent + "finds: ", " " * (indent + 7)) if finding.finds else []
        lines += _wrapped(finding.remedy, " " * indent + "-> ", " " * (indent + 3)) if finding.remedy else []
    return lines


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        max(_WIDTH, len(rest) + 40),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def failure(error: BaseException) -> str:
    """Type, place and last lines of an exception, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    last = ending(" ".join(str(error).splitlines()[-4:]), 600)
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {last}"


def ending(text: str, size: int) -> str:
    """The end of a text, cut once secrets are removed: half a secret is not recognised."""
    return Private()(text)[-size:]


def gibibytes(size: float) -> str:
    """A number of bytes, for people."""
    return f"{size / 2**30:.1f} GiB"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return ""
