"""Reads tables in the Geometry3K layout: parquet, json(l), a saved dataset or one on the hub.

A row is ``problem`` (text with one ``<image>`` per image), ``images`` (a list, a single value, or nothing for a text
row), ``answer``, and optionally ``solution``, a completion to imitate. Options name other columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from mmrl.errors import DataError
from mmrl.interfaces import DatasetLoader, PluginConfig
from mmrl.media import MAX_IMAGE_BYTES
from mmrl.types import IMAGE_PLACEHOLDER, Message, Prompt, RawImage
from mmrl_datasets.rows import Rows, open_rows

_IMAGE_NAMES = ("image", "images", "decoded_image")


class Table(DatasetLoader):
    """Prompts from a table, one row each, read when they are asked for."""

    class Config(PluginConfig):
        path: str
        """A parquet, json or jsonl file, a folder with such files, a folder that datasets saved, or a hub id."""
        split: str | None = None
        """Which split; may be left out where there is only one."""
        subset: str | None = None
        """Configuration of a hub dataset."""
        revision: str | None = Field(default=None, min_length=1)
        """Branch, tag or commit of a hub dataset; by default its default branch."""
        limit: int | None = Field(default=None, ge=1)
        """Read only the first rows."""
        prompt: str | None = None
        """Column with the question; default: problem."""
        images: str | None = None
        """Column with the images; default: images, if there is one."""
        answer: str | None = None
        """Column with the gold answer; default: answer."""
        demonstration: str | None = None
        """Column with a completion to imitate; default: solution, if there is one."""

    config: Config

    def load(self) -> Sequence[Prompt]:
        """The rows, lazily.

        Raises:
            DataError: Nothing readable at ``path``, no such split, or a column is missing. Rows are checked as they
                are read: a null, an image cell that is none, or a wrong number of ``<image>`` names row and column.
        """
        config, local = self.config, Path(self.config.path).expanduser()
        split, rows = open_rows(config.path, config.split, config.subset, config.revision)
        root = local if local.is_dir() else local.parent if local.is_file() else None
        return TableRows(config, split, rows, root)


class TableRows(Sequence[Prompt]):
    """The rows of one split as prompts. ``root`` is the folder that image paths may point into, if any.

    Raises:
        DataError: A column that is needed or named is not there.
    """

    def __init__(self, config: Table.Config, split: str, rows: Rows, root: Path | None) -> None:
        self._rows = rows
        self._split = split
        self._root = root
        self._where = f"{config.path}, split {split}"
        self._num_rows = min(len(rows), config.limit or len(rows))
        self._columns = _Columns(config, rows)
        self._demonstrations_are_named = config.demonstration is not None

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return self._prompt(row, self._rows.read(row))

    def _prompt(self, row: int, cells: dict[str, Any]) -> Prompt:
        columns, where = self._columns, f"{self._where}, row {row}"
        text = _text(cells, columns.prompt, where)
        images = self._images(cells[columns.images], where) if columns.images else ()
        return Prompt(
            id=f"{self._split}/{row}",
            messages=(Message("user", _place(text, len(images), f"{where}, column {columns.prompt!r}")),),
            images=images,
            answer=_required(cells, columns.answer, where) if columns.answer else None,
            columns={name: cells[name] for name in columns.plain},
            demonstration=self._demonstration(cells, where),
        )

    def _demonstration(self, cells: Mapping[str, Any], where: str) -> str | None:
        """Only a column that the user named must hold text in every row."""
        column = self._columns.demonstration
        if column is None:
            return None
        if self._demonstrations_are_named:
            return _text(cells, column, where)
        return cells[column] if isinstance(cells[column], str) else None

    def _images(self, cell: Any, where: str) -> tuple[RawImage, ...]:
        values = [] if cell is None else cell if isinstance(cell, list) else [cell]
        labels = [f"{where}, {self._columns.images}[{i}]" for i in range(len(values))]
        return tuple(RawImage(self._bytes(v, label), label) for v, label in zip(values, labels, strict=True))

    def _bytes(self, value: Any, label: str) -> bytes:
        if isinstance(value, Mapping):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return _read_under(self._root, value, label)
        raise DataError(
            f"An image cell holds {'null' if value is None else type(value).__name__}",
            where=label,
            possible="encoded bytes, a relative path, or a struct of bytes and path",
        )


class _Columns:
    """Which columns of a dataset play which part.

    Raises:
        DataError: A column that is needed or named is not there.
    """

    def __init__(self, config: Table.Config, rows: Rows) -> None:
        self._found = rows.columns
        self._where = config.path
        prompt = self._find("prompt", config.prompt, "problem", needed=True)
        assert prompt is not None
        self.prompt = prompt
        self.images = self._find("images", config.images, "images")
        self.demonstration = self._find("demonstration", config.demonstration, "solution")
        self.answer = self._find("answer", config.answer, "answer", needed=self.demonstration is None)
        pictures = [n for n in self._found if n in rows.image_columns or n in _IMAGE_NAMES]
        if pictures and self.images is None:
            self._missing("images", "images", "set data.<train or eval>.images, or remove the columns for text rows")
        self.plain = tuple(n for n in self._found if n != self.images and n not in pictures)

    def _find(self, option: str, named: str | None, default: str, *, needed: bool = False) -> str | None:
        column = named or default
        if column in self._found:
            return column
        if named is not None or needed:
            example = next(iter(self._found), "...")
            self._missing(option, column, f"name one of them, such as {{name: table, {option}: {example}}}")
        return None

    def _missing(self, option: str, column: str, remedy: str) -> None:
        raise DataError(
            f"The dataset has no column {column!r} for its {option}",
            where=self._where,
            possible=", ".join(self._found),
            remedy=remedy,
        )


def _required(cells: Mapping[str, Any], column: str, where: str) -> Any:
    if cells[column] is None:
        raise DataError(f"Column {column!r} is null", where=where, remedy="fill the cell or remove the row")
    return cells[column]


def _text(cells: Mapping[str, Any], column: str, where: str) -> str:
    text = _required(cells, column, where)
    if not isinstance(text, str):
        raise DataError(
            f"Column {column!r} holds {type(text).__name__}, not text",
            where=where,
            remedy="name the text column with the option prompt or demonstration",
        )
    return text


def _place(text: str, num_images: int, where: str) -> str:
    """The text with one ``<image>`` per image; without any, they go first, with nothing in between."""
    num_found = text.count(IMAGE_PLACEHOLDER)
    if num_found == 0:
        return IMAGE_PLACEHOLDER * num_images + text
    if num_found != num_images:
        raise DataError(
            f"The row has {num_found} {IMAGE_PLACEHOLDER} and {num_images} images",
            where=where,
            possible=f"one {IMAGE_PLACEHOLDER} per image, or none",
        )
    return text


def _read_under(root: Path | None, value: str, label: str) -> bytes:
    """Bytes of an image file that lies under ``root``, links followed."""
    try:
        path = None if root is None or "://" in value else (root / value).resolve()
        if path is None or root is None or not path.is_relative_to(root.resolve()):
            below = "a local dataset's folder" if root is None else f"{root}"
            raise DataError(
                f"The image path {value!r} does not lie in the dataset's folder",
                where=label,
                possible=f"encoded bytes, or a path to a file below {below}",
            )
        if not path.is_file():
            raise DataError(f"There is no image file {value!r}", where=label, possible=f"a file below {root}")
        with path.open("rb") as stream:
            return stream.read(MAX_IMAGE_BYTES + 1)  # one byte too many is enough to be refused later
    except (OSError, ValueError, RuntimeError) as error:  # a null character, a loop of links
        raise DataError(f"The image {value!r} cannot be read: {error}", where=label) from error
