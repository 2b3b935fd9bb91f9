"""A look at some rows of a table: names of columns do not say what stands in them, and reading all rows takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.errors import DataError

FIRST, SPREAD = 8, 24
"""Rows that are looked at: the first ones, and others all over the table."""

Glance = Mapping[str, Sequence[tuple[int, Any]]]
"""Some cells of each column that hold something, with their rows."""


def places(count: int) -> list[int]:
    """The first places and some spread ones, of so many."""
    spread = np.linspace(0, count - 1, min(count, SPREAD)).astype(int).tolist() if count else []
    return list(dict.fromkeys([*range(min(count, FIRST)), *spread]))


def is_filled(value: Any) -> bool:
    """False for null, empty text, and lists and structs of nothing else."""
    if isinstance(value, Mapping):
        return any(map(is_filled, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_filled, value))
    return value is not None and not (isinstance(value, (str, bytes)) and not value)


def look(read: Callable[[int], Mapping[str, Any]], rows: Iterable[int], columns: Sequence[str]) -> Glance:
    """The filled cells of these rows; rows that cannot be read are told of when they are used."""
    found: dict[str, list[tuple[int, Any]]] = {column: [] for column in columns}
    for row in sorted(rows):
        try:
            cells = read(row)
        except DataError:
            continue
        for column in columns:
            if is_filled(cells.get(column)):
                found[column].append((row, cells[column]))
    return found


class Firsts:
    """The columns of a text table, and the first row in which each holds something."""

    def __init__(self) -> None:
        self._rows: dict[str, int | None] = {}

    def note(self, row: int, names: Iterable[str], values: Iterable[Any]) -> None:
        for name, value in zip(names, values, strict=False):
            if self._rows.get(name) is None:
                self._rows[name] = row if is_filled(value) else None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the order in which they came."""
        return tuple(self._rows)

    def rows(self, columns: Sequence[str], count: int) -> list[int]:
        """Rows to look at, among them one in which each column holds something."""
        firsts = [row for column in columns if (row := self._rows.get(column)) is not None]
        return list(dict.fromkeys([*places(count), *firsts]))
