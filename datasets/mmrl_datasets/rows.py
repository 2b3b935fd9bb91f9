"""The rows of a table in text, parquet or arrow files, in a dataset that was saved, or on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.data.floats import row_reader
from mmrl.data.hub import HubRepo
from mmrl.errors import DataError, MMRLError, first_line
from mmrl_datasets.glances import Glance, look, places
from mmrl_datasets.lines import CsvRows, JsonRows, names_and_sizes
from mmrl_datasets.links import broken_link
from mmrl_datasets.parquet import ParquetRows, undecoded

if TYPE_CHECKING:
    from datasets import Dataset

_SHARD_NUMBER = re.compile(r"-\d.*$")


class Rows(Protocol):
    """Rows that are read one at a time; images stay encoded.

    Attributes:
        columns: Names of all columns.
        image_columns: Columns that are declared to hold images.
    """

    columns: tuple[str, ...]
    image_columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """The cells of one row by column, null as None."""
        ...

    def glance(self, columns: Sequence[str]) -> Glance:
        """Cells of some rows, those that hold something; cheap however many rows there are."""
        ...

    def fingerprint(self) -> str:
        """A text that changes when the files do, found without reading them."""
        ...


def open_rows(path: str, split: str | None, subset: str | None, revision: str | None) -> tuple[str, Rows]:
    """The name of the split and its rows.

    Raises:
        DataError: ``path`` has nothing readable, no such split, or no row.
    """
    local = Path(path).expanduser()
    if local.exists() or local.is_symlink() or _looks_local(path):
        for option, value in (("subset", subset), ("revision", revision)):
            if value is not None:
                raise DataError(f"{option} belongs to hub datasets", where=path, remedy=f"leave {option} out")
        name, rows = _open_local(local, split)
    else:
        with _quiet():
            name, rows = _open_hub(HubRepo("dataset", path, revision), split, subset)
    if not len(rows):
        raise DataError("The dataset has no rows", where=f"{path}, split {name}")
    return name, rows


class ArrowRows:
    """The rows of a ``datasets.Dataset``."""

    def __init__(self, dataset: Dataset, files: Sequence[Path] = ()) -> None:
        self._rows = dataset.with_format("arrow")
        self._files = files or [Path(file["filename"]) for file in dataset.cache_files]
        self._features = undecoded(dataset.features)
        self._shortest = row_reader(dataset.features.arrow_schema)
        self.columns = tuple(dataset.column_names)
        self.image_columns = tuple(name for name in self.columns if _holds_images(dataset.features[name]))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        cells: dict[str, Any] = self._features.decode_example(self._shortest(self._rows[index].to_pylist()[0]))
        return cells

    def glance(self, columns: Sequence[str]) -> Glance:
        return look(self.read, places(len(self)), columns)

    def fingerprint(self) -> str:
        return names_and_sizes(self._files)


def _open_arrow(files: Sequence[Path]) -> ArrowRows:
    from datasets import concatenate_datasets

    return ArrowRows(concatenate_datasets([_mapped(file) for file in files]), files)


def _mapped(file: Path) -> Dataset:
    """A memory-mapped arrow file: a stream, as ``datasets`` writes them, or the random-access format."""
    import pyarrow as pa
    from datasets.table import InMemoryTable

    from datasets import Dataset

    with file.open("rb") as stream:
        if stream.read(6) != b"ARROW1":
            return Dataset.from_file(str(file))
    table = InMemoryTable(pa.ipc.open_file(pa.memory_map(str(file))).read_all())
    return Dataset(table, fingerprint=file.name)  # by itself it would hash all of the table


READERS: Mapping[str, Callable[[Sequence[Path]], Rows]] = {
    ".parquet": ParquetRows,
    ".json": JsonRows,
    ".jsonl": JsonRows,
    ".csv": CsvRows,
    ".arrow": _open_arrow,
}
"""Readers by the ends of files' names."""


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in READERS


def _open_local(path: Path, split: str | None) -> tuple[str, Rows]:
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _open_saved(path, split)
        by_split = _files_by_split(path)
        name = _choose(by_split, split, str(path))
        readers = {READERS[file.suffix] for file in by_split[name]}
        if len(readers) > 1:
            found = ", ".join(file.name for file in by_split[name])
            raise DataError(
                f"Split {name!r} has files of several kinds", where=str(path), possible=found, remedy="give one file"
            )
        return name, readers.pop()(by_split[name])
    except MMRLError:
        raise
    except Exception as error:  # pyarrow and datasets raise a dozen kinds
        raise DataError(
            f"The dataset cannot be read: {first_line(error.__cause__ or error)}",
            where=str(path),
            remedy="check that the file is whole and may be read",
        ) from error


def _open_saved(path: Path, split: str | None) -> tuple[str, Rows]:
    """The split's name and rows in a folder that ``save_to_disk`` of ``datasets`` has written."""
    from datasets import DatasetDict, load_from_disk

    with _quiet():
        saved = load_from_disk(str(path))
    splits = dict(saved) if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    name = _choose(splits, split, str(path))
    return name, ArrowRows(splits[name])


def _files_by_split(path: Path) -> dict[str, list[Path]]:
    """Table files by split; ``train-00000-of-00002.parquet`` belongs to ``train``."""
    if not path.exists():
        where = broken_link(path) or str(path)
        raise DataError("There is no such file or folder", where=where, remedy=f"check path, seen from {Path.cwd()}")
    splits: dict[str, list[Path]] = {}
    files = tables(path) if path.is_dir() else [path]
    for file in files:
        if file.suffix in READERS:
            splits.setdefault(_SHARD_NUMBER.sub("", file.stem), []).append(file)
    if not splits:
        raise DataError("There is no table here", where=str(path), possible=f"files that end in {', '.join(READERS)}")
    return splits


def tables(folder: Path) -> list[Path]:
    """The table files of a folder, or of its folder ``data``, as clones of hub datasets have it.

    Raises:
        DataError: One of them is a link that leads nowhere.
    """
    for place in (folder, folder / "data"):
        files = [file for file in sorted(place.iterdir()) if file.suffix in READERS] if place.is_dir() else []
        if broken := next(filter(None, map(broken_link, files)), ""):
            raise DataError("A table is a broken link", where=broken, remedy="mend the link, or remove it")
        if found := [file for file in files if file.is_file()]:
            return found
    return []


def _open_hub(repo: HubRepo, split: str | None, subset: str | None) -> tuple[str, Rows]:
    from datasets import load_dataset_builder

    pinned = repo.pinned()
    builder = pinned.ask(lambda: load_dataset_builder(repo.name, subset, revision=pinned.revision))
    # Where the hub does not answer, datasets takes the last revision that it has prepared, whichever was asked for.
    if builder.hash != pinned.revision:
        raise pinned.lacks("data of this revision")
    pinned.ask(builder.download_and_prepare)
    name = _choose(builder.info.splits or {}, split, str(pinned))
    return name, ArrowRows(builder.as_dataset(split=name))


def _choose(splits: Mapping[str, Any], split: str | None, where: str) -> str:
    name = split or next(iter(splits))
    if name not in splits or (split is None and len(splits) > 1):
        raise DataError(
            f"There is no split {split!r}" if split else "There are several splits and none is named",
            where=where,
            possible=", ".join(splits),
            remedy="set split to one of them",
        )
    return name


def _holds_images(feature: Any) -> bool:
    from datasets import Image

    while hasattr(feature, "feature"):  # List
        feature = feature.feature
    return isinstance(feature, Image)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the bars of datasets, and its log lines about failures, which our own errors repeat."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    were_disabled, verbosity = are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not were_disabled:
            enable_progress_bars()
