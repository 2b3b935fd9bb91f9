"""Reads tables of questions in any of the layouts in use, one prompt a row.

A column's role follows from its name (``mmrl_datasets.names.ALIASES``) or an option. A row may be a plain question,
a chat or a ShareGPT conversation, with images in any form. The README of datasets/ has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from mmrl.data.templates import PromptTemplate
from mmrl.errors import DataError
from mmrl.interfaces import DatasetLoader
from mmrl.types import Prompt
from mmrl_datasets.columns import choose_columns
from mmrl_datasets.compared import COMPARED
from mmrl_datasets.links import broken_link, folders_of
from mmrl_datasets.names import ALIASES
from mmrl_datasets.options import TableOptions
from mmrl_datasets.parquet import ParquetRows
from mmrl_datasets.reader import RowReader
from mmrl_datasets.rows import Rows, open_rows, tables

_NOTED = 8


class Table(DatasetLoader):
    """Prompts from a table, one row each, read when they are asked for."""

    reads_rows = True
    added: ClassVar[tuple[str, ...]] = ()
    """Columns that ``adapt`` puts into each row and that the table does not have."""

    class Config(TableOptions):
        """All options; a recipe has other defaults."""

    config: Config
    _described: Mapping[str, str] | None = None
    _rows: Rows | None = None
    _notes: tuple[str, ...] = ()
    _prompts: TableRows | None = None

    def load(self) -> Sequence[Prompt]:
        """The rows, lazily.

        Raises:
            ConfigError: The prompt template is not valid.
            DataError: Nothing readable at ``path``, no such split, or columns that are missing or ambiguous. Rows are
                checked as they are read: a null, a wrong type, an image cell that is none or placeholders that do not
                fit name row and column.
        """
        config = self.config
        split, rows, folders = self.open()
        named = {role: getattr(config, role) for role in ALIASES}
        columns = choose_columns(rows, named, config.path, asks=type(self) is Table, added=self.added)
        reader = RowReader(config, columns, split, folders, self.adapt)
        self._rows, self._notes = rows, columns.notes
        prompts = self._prompts = TableRows(rows, reader, config.limit)
        if isinstance(rows, ParquetRows) and type(self).adapt is Table.adapt:
            rows.leave_out(set(rows.columns) - columns.used)
        shown = f"{len(prompts)} of {len(rows)}" if len(prompts) < len(rows) else f"{len(rows)}"
        self._described = {"path": config.path, "split": split, "rows": shown, **columns.described()}
        return prompts

    def open(self) -> tuple[str, Rows, tuple[Path, ...]]:
        """The name of the split, its rows, and the folders that image paths start from, if any.

        Raises:
            DataError: Nothing readable at ``path``, or no such split.
        """
        config = self.config
        split, rows = open_rows(config.path, config.split, config.subset, config.revision)
        return split, rows, _image_folders(config)

    def describe(self) -> Mapping[str, str]:
        """Path, split and rows, then the column of each role that has one."""
        return self._described or {}

    def notes(self) -> Sequence[str]:
        """Columns that look needed and have no role, and what rows that were read had beside what was read."""
        if self._prompts is None:
            return ()
        return (*self._notes, *self._prompts.notes())

    def fingerprint(self) -> str:
        """Names and sizes of the files, footers of parquet files, and the options that are no place.

        Files that rows name, such as images, are not part of it.
        """
        assert self._rows is not None, "after load"
        places = {"path", "revision", "image_root", "prompt_template"}
        # Runs that began before there were answers to compare, categories, or documents, go on.
        unnamed = {role for role in (*COMPARED, "category", "document") if getattr(self.config, role) is None}
        options = self.config.model_dump(mode="json", exclude=places | unnamed)
        template = self.config.prompt_template
        text = None if template is None else PromptTemplate(template, "the dataset's prompt_template").text
        return f"{type(self).__name__} {options} {text!r} {self._rows.fingerprint()}"

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Change the cells of a row before they are read, so that a recipe can put a question together.

        Raises:
            DataError: A cell cannot be used.
        """
        return cells


class TableRows(Sequence[Prompt]):
    """The rows of one split as prompts, the first ``limit`` if that is given."""

    def __init__(self, rows: Rows, reader: RowReader, limit: int | None = None) -> None:
        self._rows = rows
        self._reader = reader
        self._num_rows = min(len(rows), limit or len(rows))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return self._reader.read(row, self._rows.read(row))

    def notes(self) -> list[str]:
        """A sentence on each thing in the rows that was not read; of rows of which none was read yet, the first few."""
        if not self._reader.has_read:
            for row in range(min(len(self), _NOTED)):
                with suppress(DataError):
                    self[row]
        return [f"{what} (row {row})" + told for (what, told), row in self._reader.left_out.items()]


def _image_folders(config: Table.Config) -> tuple[Path, ...]:
    """The folders that image paths start from; of data files that are links, those of the files too."""
    if config.image_root is not None:
        root = Path(config.image_root).expanduser()
        if not root.is_dir():
            where = broken_link(root) or config.image_root
            raise DataError("image_root is no folder", where=where, remedy=f"check it, from {Path.cwd()}")
        return (root,)
    local = Path(config.path).expanduser()
    if local.is_dir():
        return tuple(dict.fromkeys([local, *(folder for file in tables(local) for folder in folders_of(file)[1:])]))
    return folders_of(local) if local.is_file() else ()
