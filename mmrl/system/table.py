"""Columns of text for people."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def table(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """A line for each row, its columns as wide as their longest cells.

    Args:
        align: ``<`` or ``>`` for each column; the last one is for all that follow too.
    """
    widths = column_widths(rows)
    return [line(cells, widths, align) for cells in rows]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The length of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def line(cells: Sequence[str], widths: Sequence[int], align: str = "<") -> str:
    """One row of a table, whose other rows need not be known yet."""
    sides = align.ljust(len(cells), align[-1])
    return GAP.join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)).rstrip()
