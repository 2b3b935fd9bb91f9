"""Text tables: JSON, JSON lines and CSV, with values kept as they are written and rows parsed when they are read.

``datasets`` would make dates of ``"2020-01-01"``, floats of integers, and ``7`` of ``"007"``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from mmrl.data.images import MAX_IMAGE_BYTES
from mmrl.errors import DataError
from mmrl_datasets.glances import Firsts, Glance, look

_NULLS = ("", "nan", "NaN")
"""Spellings of null in csv files."""
_BOM = b"\xef\xbb\xbf"


class JsonRows:
    """The objects of json files (an array each) and jsonl files (one a line); lines are parsed again on each read."""

    image_columns: tuple[str, ...] = ()

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        # As in a table, a column exists in all rows if one has it; insertion order is kept.
        self._rows, self._firsts = list[_Place | dict[str, Any]](), Firsts()
        for row, cells in chain.from_iterable(map(_index, files)):
            self._firsts.note(len(self._rows), cells, cells.values())
            self._rows.append(row)
        self.columns = self._firsts.columns

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        """The cells of one row.

        Raises:
            DataError: The file has become unreadable.
        """
        row = self._rows[index]
        cells = _object(_loads(row.read(), row.where), row.where) if isinstance(row, _Place) else row
        return {name: cells.get(name) for name in self.columns}

    def glance(self, columns: Sequence[str]) -> Glance:
        return look(self.read, self._firsts.rows(columns, len(self)), columns)

    def fingerprint(self) -> str:
        return names_and_sizes(self._files)


class CsvRows:
    """The records of csv files with a header each; every cell is text, and an empty one or ``nan`` is null."""

    image_columns: tuple[str, ...] = ()

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._rows: list[tuple[_Place, tuple[str, ...]]] = []
        self._firsts = Firsts()
        for file in files:
            with file.open("rb") as stream:
                records = _records(stream, file)
                header = tuple(next(records, (None, []))[1])
                if len(set(header)) < len(header) or not all(header):
                    raise DataError(
                        "A column of the header has no name, or the name of another",
                        where=str(file),
                        possible=", ".join(header),
                        remedy="name each once; pandas writes its index without a name: to_csv(..., index=False)",
                    )
                self._firsts.note(0, header, repeat(None))
                for place, cells in records:
                    if cells:
                        self._firsts.note(len(self._rows), header, (None if c in _NULLS else c for c in cells))
                        self._rows.append((place, header))
        self.columns = self._firsts.columns

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        """The cells of one row.

        Raises:
            DataError: It has more or fewer cells than the header, or the file has become unreadable.
        """
        place, header = self._rows[index]
        with place.open() as stream:
            cells = next(_records(stream, place.file, place.number), (place, []))[1]
        if len(cells) != len(header):
            raise DataError(f"The record has {len(cells)} cells and the header {len(header)}", where=place.where)
        named = dict(zip(header, cells, strict=True))
        return {name: None if named.get(name, "") in _NULLS else named[name] for name in self.columns}

    def glance(self, columns: Sequence[str]) -> Glance:
        return look(self.read, self._firsts.rows(columns, len(self)), columns)

    def fingerprint(self) -> str:
        return names_and_sizes(self._files)


def names_and_sizes(files: Sequence[Path]) -> str:
    """The name and the size of each file."""
    return repr([(file.name, file.stat().st_size) for file in files])


@dataclass(frozen=True, slots=True)
class _Place:
    """The start of a row in its file."""

    file: Path
    number: int
    offset: int

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.number}"

    @contextmanager
    def open(self) -> Iterator[Any]:
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.offset)
                yield stream
        except OSError as error:
            raise DataError(f"The line cannot be read: {error.strerror}", where=self.where) from error

    def read(self) -> bytes:
        with self.open() as stream:
            line: bytes = stream.readline()
            return line


def _index(file: Path) -> Iterator[tuple[_Place | dict[str, Any], dict[str, Any]]]:
    """The elements of a file that holds an array, or the places of lines of any other file; each with its cells."""
    with file.open("rb") as stream:
        if stream.read(64).lstrip(_BOM + b" \t\r\n").startswith(b"["):
            stream.seek(0)
            for number, row in enumerate(_loads(stream.read(), str(file))):
                cells = _object(row, f"{file}, element {number}")
                yield cells, cells
            return
        stream.seek(0)
        offset = 0
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = _Place(file, number, offset)
                yield place, _object(_loads(line, place.where), place.where)
            offset += len(line)


def _loads(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"This is not JSON: {error}", where=where, possible="an array of objects, or one object a line"
        ) from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError("A JSON row is not an object", where=where, possible='{"problem": ..., "answer": ...}')
    return value


def _records(stream: Any, file: Path, number: int = 1) -> Iterator[tuple[_Place, list[str]]]:
    """The records from here on with their places; one may hold line breaks between quotes."""
    position = [number, stream.tell()]

    def lines() -> Iterator[str]:
        for line in stream:
            data = line.removeprefix(_BOM) if position[1] == 0 else line
            position[0] += 1
            position[1] += len(line)
            yield data.decode("utf-8")

    reader = csv.reader(lines(), strict=True)
    while True:
        place = _Place(file, *position)
        try:
            with _long_fields():
                cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"This is not CSV: {error}", where=place.where, possible="comma-separated UTF-8 with a header"
            ) from error
        yield place, cells


@contextmanager
def _long_fields() -> Iterator[None]:
    """Make room for an image as a data URI in one cell; the limit belongs to the interpreter, so it is put back."""
    before = csv.field_size_limit(2 * MAX_IMAGE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)
