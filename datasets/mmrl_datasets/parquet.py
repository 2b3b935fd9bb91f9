"""Parquet files, read one row group at a time and never copied, unless their row groups are too large for that.

Reading any row costs decoding its row group. Of a large group (many writers put all rows into one) only the rows up to
the one that is asked for are decoded, in bounded memory, and later rows go on from there. Once as many rows of a group
were passed over as it has, it is rewritten with groups of about a megabyte, unless large groups of a table take more
than ``COPY_BYTES``. Hugging Face ``datasets`` would copy every file, and holds a whole row group while it does;
tests/benchmarks/README.md has the cost.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.data.floats import row_reader
from mmrl.errors import DataError, ResourceError, first_line
from mmrl_datasets.glances import Glance, is_filled, places

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from datasets import Features

MAX_GROUP_BYTES = 16 * 2**20
MAX_GROUP_ROWS = 2048
"""Larger row groups are split: decoding one takes some 10 ms, and one of repeated values may unfold to any size."""
COPY_GROUP_BYTES = 2**20
COPY_BYTES = 16 * 2**30
"""Bytes of large row groups of a table, uncompressed, up to which they are copied."""
CACHE_BYTES = 64 * 2**20
_GLANCED_GROUPS, _GLANCED_BYTES = 8, 2**20
_BATCH_ROWS = 64
_BUFFER_BYTES = 2**20


class ParquetRows:
    """The rows of parquet files, in order; keeps the row groups read last, up to ``CACHE_BYTES``.

    Raises:
        DataError: A file is no parquet, or two of its columns have one name.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._groups = [group for file in files for group in _groups(file)]
        self._starts = _starts(self._groups)
        schemas_by_path = {group.path: group.schema for group in self._groups}
        schemas = schemas_by_path.values()
        self.columns = tuple(dict.fromkeys(name for schema in schemas for name in schema.names))
        features = [_features(schema) for schema in schemas]
        self.image_columns = tuple(
            dict.fromkeys(name for each in features for name, feature in each.items() if _is_image(feature))
        )
        self._decode = _json_decoder(next(iter(schemas), None))
        self._shortest = {path: row_reader(schema) for path, schema in schemas_by_path.items()}
        self._unused: frozenset[str] = frozenset()
        self._tables: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._table_bytes = 0
        self._passing: _Passing | None = None
        self._passed: Counter[int] = Counter()
        self._copies: dict[int, list[_Group]] = {}
        self._copies_all = sum(group.num_bytes for group in self._groups if group.is_large) <= COPY_BYTES

    def __len__(self) -> int:
        return self._starts[-1]

    def leave_out(self, columns: Collection[str]) -> None:
        """Read these columns no more; their cells are null."""
        self._unused = frozenset(columns)

    def read(self, index: int) -> dict[str, Any]:
        """The cells of one row.

        Raises:
            DataError: The file has become damaged or is gone.
            ResourceError: There is no room for a copy of its large row group.
        """
        number = bisect_right(self._starts, index) - 1
        [stored] = self._stored(number, index - self._starts[number]).to_pylist()
        cells = self._decode(self._shortest[self._groups[number].path](stored))
        return {name: cells.get(name) for name in self.columns}

    def glance(self, columns: Sequence[str]) -> Glance:
        """Cells of some row groups all over the files; of large columns, those of a group's first rows."""
        import pyarrow.compute as pc

        found: dict[str, list[tuple[int, Any]]] = {column: [] for column in columns}
        spread = np.unique(np.linspace(0, len(self._groups) - 1, min(len(self._groups), _GLANCED_GROUPS)).astype(int))
        for number in spread.tolist() if columns else ():
            table = self._groups[number].glance(columns)
            for column in table.column_names:
                cells = table[column]
                filled = pc.indices_nonzero(cells.is_valid())  # to_numpy of a column would import pandas
                for row in (filled[place].as_py() for place in places(len(filled))):
                    if is_filled(value := cells[row].as_py()):
                        found[column].append((self._starts[number] + row, value))
        return found

    def fingerprint(self) -> str:
        """Name, size and footer of each file."""
        return repr([(file.name, file.stat().st_size, _footer(file)) for file in self._files])

    def _stored(self, number: int, row: int) -> pa.Table | pa.RecordBatch:
        """A row of a row group as it is stored."""
        group = self._groups[number]
        if not group.is_large:
            return self._table(number, 0, group).slice(row, 1)
        is_near = self._passing is not None and self._passing.group is group and row >= self._passing.start
        if not is_near and number not in self._copies and self._is_to_copy(number):
            self._copies[number] = list(_groups(group.copied(), is_copy=True))
        if copies := self._copies.get(number):
            starts = _starts(copies)
            small = bisect_right(starts, row) - 1
            return self._table(number, small, copies[small]).slice(row - starts[small], 1)
        if self._passing is None or not is_near:
            self._passing = _Passing(group, self._unused)
        before = self._passing.start
        found = self._passing.read(row)
        self._passed[number] += self._passing.start - before
        return found

    def _is_to_copy(self, number: int) -> bool:
        """True if a copy of a large row group pays, or is there."""
        group = self._groups[number]
        has_passed = self._passed[number] + _BATCH_ROWS >= group.num_rows
        return self._copies_all and (has_passed or group.copy.exists())

    def _table(self, number: int, small: int, group: _Group) -> pa.Table:
        """All rows of a row group, or of a small one in the copy of a large one."""
        key = number, small
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = group.read(self._unused)
        self._tables[key] = table
        self._table_bytes += table.nbytes
        while self._table_bytes > CACHE_BYTES and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self._table_bytes -= oldest.nbytes
        return table


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group.

    Attributes:
        num_bytes: Bytes of its columns before they were compressed.
        is_large: True if it is not to be decoded as a whole.
    """

    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema
    index: int
    num_rows: int
    num_bytes: int
    is_large: bool

    @property
    def copy(self) -> Path:
        """The place of the copy with small row groups, in the cache of the hub; another one if the file changes."""
        from huggingface_hub import constants

        stat = self.path.stat()
        key = f"{self.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{self.index}"
        name = hashlib.sha256(key.encode()).hexdigest()
        return Path(constants.HF_HOME) / "mmrl" / "row_groups" / f"{name}.parquet"

    def read(self, unused: Collection[str]) -> pa.Table:
        """All rows."""
        import pyarrow.parquet as pq

        with (
            _arrow_errors(self.path),
            pq.ParquetFile(self.path, metadata=self.metadata, pre_buffer=False) as file,
        ):
            return file.read_row_group(self.index, columns=self._columns(unused), use_threads=False)

    def glance(self, columns: Collection[str]) -> pa.Table:
        """These columns of all rows, or of the first ones if they are large.

        Raises:
            DataError: The file is damaged.
        """
        import pyarrow as pa

        unused = [name for name in self.schema.names if name not in columns]
        group = self.metadata.row_group(self.index)
        chunks = [group.column(place) for place in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in columns)
        if size <= _GLANCED_BYTES:
            return self.read(unused)
        with _arrow_errors(self.path), closing(self.batches(unused)) as batches:
            return pa.Table.from_batches([next(batches)])

    def batches(self, unused: Collection[str] = ()) -> Generator[pa.RecordBatch]:
        """The rows, some at a time.

        Raises:
            OSError, pyarrow.ArrowException: They cannot be read.
        """
        import pyarrow.parquet as pq

        # Buffered, batch by batch: a column chunk of any size is never in memory at once.
        source = pq.ParquetFile(self.path, metadata=self.metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        with source as file:
            yield from file.iter_batches(
                _BATCH_ROWS, row_groups=[self.index], columns=self._columns(unused), use_threads=False
            )

    def copied(self) -> Path:
        """A copy with small row groups, made if it is not there.

        Raises:
            DataError: The file is damaged.
            ResourceError: There is no room.
        """
        copy = self.copy
        if copy.exists():
            return copy
        temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
        with _arrow_errors(self.path):
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                _write(self.schema, self.batches(), temporary)
                temporary.replace(copy)
            except OSError as error:
                # A damaged source is an OSError of pyarrow's without a number.
                if error.errno is None:
                    raise
                raise ResourceError(
                    f"A copy of the parquet file with smaller row groups cannot be written: {error.strerror}",
                    where=f"{self.path}, to {copy.parent}",
                    remedy="make room there, set HF_HOME to another folder, or write the file with smaller row groups",
                ) from error
            finally:
                with suppress(OSError):
                    temporary.unlink()
        return copy

    def _columns(self, unused: Collection[str]) -> list[str] | None:
        return [name for name in self.schema.names if name not in unused] if unused else None


class _Passing:
    """A large row group that is passed over from its start; the rows of one batch are in memory.

    Attributes:
        start: The first of them.
    """

    def __init__(self, group: _Group, unused: Collection[str]) -> None:
        self.group, self.start = group, 0
        self._batches = group.batches(unused)
        self._batch: pa.RecordBatch | None = None

    def read(self, row: int) -> pa.RecordBatch:
        """A row of the batch, or of a later one."""
        with _arrow_errors(self.group.path):
            while self._batch is None or row >= self.start + self._batch.num_rows:
                self.start += 0 if self._batch is None else self._batch.num_rows
                self._batch = next(self._batches)
        return self._batch.slice(row - self.start, 1)


def _groups(path: Path, *, is_copy: bool = False) -> Iterator[_Group]:
    """The row groups of a file, leaving out empty ones; none of a copy is large."""
    import pyarrow.parquet as pq

    with _arrow_errors(path), pq.ParquetFile(path) as file:
        metadata, schema = file.metadata, file.schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise DataError("Two columns have the same name", where=str(path), possible=", ".join(schema.names))
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        rows, size = group.num_rows, group.total_byte_size
        if rows:
            is_large = not is_copy and (size > MAX_GROUP_BYTES or rows > MAX_GROUP_ROWS)
            yield _Group(path, metadata, schema, index, rows, size, is_large)


def _starts(groups: Sequence[_Group]) -> list[int]:
    """The number of the first row of each group, and of all rows."""
    return [0, *accumulate(group.num_rows for group in groups)]


def _footer(path: Path) -> str:
    """A hash of the file's footer: the places, sizes and statistics of its columns."""
    with _arrow_errors(path), path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, os.SEEK_END)
        return hashlib.sha256(file.read(size)).hexdigest()


def _write(schema: pa.Schema, batches: Iterator[pa.RecordBatch], target: Path) -> None:
    """Write rows with small row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(target, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(each.nbytes for each in held) >= COPY_GROUP_BYTES or len(held) * _BATCH_ROWS >= MAX_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(held, schema))
                held = []
        if held:
            writer.write_table(pa.Table.from_batches(held, schema))


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"The parquet file cannot be read: {first_line(error)}",
            where=str(path),
            remedy="check that the file is whole and may be read",
        ) from error


def _features(schema: pa.Schema) -> dict[str, Any]:
    """The notes of ``datasets`` about the columns from when it wrote the file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _is_image(feature: Any) -> bool:
    """True if a noted feature is an image or a list of them."""
    while isinstance(feature, list) and feature:
        feature = feature[0]
    while isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    return isinstance(feature, dict) and feature.get("_type") == "Image"


def _json_decoder(schema: pa.Schema | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Decodes columns that ``datasets`` stores as JSON text; it is slow to import, and hardly ever needed."""
    if schema is None or '"_type": "Json"' not in json.dumps(_features(schema)):
        return lambda cells: cells
    from datasets import Features

    features = undecoded(Features.from_arrow_schema(schema))
    return lambda cells: dict(features.decode_example(cells))


def undecoded(features: Features) -> Features:
    """The features with images and other media left as they are stored."""
    from datasets import Features, Json

    def stored(feature: Any) -> Any:
        if isinstance(feature, Mapping):
            return {name: stored(inner) for name, inner in feature.items()}
        if hasattr(feature, "feature"):  # List
            return replace(feature, feature=stored(feature.feature))
        keep = isinstance(feature, Json) or not hasattr(feature, "decode")
        return feature if keep else replace(feature, decode=False)

    return Features(stored(features))
