"""A report: numbers for a program, lines for a person, and all errors that would stop or poison the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import HubUnreachableError, MMRLError, plural

INDENT = 11
"""Columns of a section's title."""


@dataclass(slots=True)
class Report:
    """Grows while the parts of a run are examined.

    Attributes:
        lines: Lines for a person.
        data: Values for a program.
        errors: Errors that would stop or poison the run, in the order found.
        warnings: Facts that a user should know.
        notes: Parts that could not be examined, because a hub cannot be reached.
    """

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    errors: list[MMRLError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The first error's exit code; 0 without errors."""
        return self.errors[0].exit_code if self.errors else 0

    def show(self, title: str, lines: Sequence[str]) -> None:
        """Add lines under each other, the first one after the title."""
        first = f"{title:<{INDENT}}" if len(title) < INDENT else f"{title}  "
        self.lines += [f"{'' if i else first:<{INDENT}}{line}".rstrip() for i, line in enumerate(lines)]

    def add(self, name: str, data: Any, lines: Sequence[str], *, title: str | None = None) -> None:
        """Add a section: its data, and its lines, the first one after the title, by default the name."""
        self.data[name] = data
        self.show(name if title is None else title, lines)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Collect what the block raises and go on after it."""
        try:
            yield
        except HubUnreachableError as error:
            self.notes += [str(error)] if str(error) not in self.notes else []
        except MMRLError as error:
            self.blame(error)

    def blame(self, error: MMRLError) -> None:
        """Add an error, unless the same was found in another row."""
        if error.what not in {each.what for each in self.errors}:
            self.errors.append(error)

    def complete(self) -> Mapping[str, Any]:
        """The data with errors, warnings and notes."""
        return {
            **self.data,
            "warnings": self.warnings,
            "errors": [{"exit_code": error.exit_code, "message": str(error)} for error in self.errors],
            "notes": self.notes,
        }

    def text(self) -> list[str]:
        """The lines with warnings and notes; errors are for stderr."""
        warnings = [f"{'warning':<{INDENT}}{warning}" for warning in self.warnings]
        notes = [f"not checked, because a hub cannot be asked:\n{note}" for note in self.notes]
        return [*self.lines, *warnings, *notes]


def excerpt(value: object, limit: int = 80) -> str:
    """A value, short enough for a line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def rows(count: int) -> str:
    """A count of rows in words: ``1 row``, ``2 rows``."""
    return plural(count, "row")


def shortened(lines: Sequence[str], shown: int) -> list[str]:
    """The first lines, and how many more there are."""
    more = [f"and {len(lines) - shown} more"] if len(lines) > shown else []
    return [*lines[:shown], *more]


def counted(counts: Mapping[str, int]) -> str:
    """Names with their counts, the most frequent first: ``RGB 12, RGBA 3``."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def duration(seconds: float) -> str:
    """Seconds as a text of two units at most, such as ``42 s``, ``5 min 40 s`` or ``2 h 5 min``."""
    seconds = round(seconds)
    for unit, size, below, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            whole, rest = seconds // size, seconds % size // smaller
            return f"{whole} {unit} {rest} {below}" if rest else f"{whole} {unit}"
    return f"{seconds} s"
