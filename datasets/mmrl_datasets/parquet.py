"""Parquet files, read one row group at a time and never copied, unless their row groups are too large for that.

Reading any row costs decoding its row group, so files whose groups are large (many writers put all rows into one) are
rewritten once, in bounded memory, with groups of about a megabyte. Hugging Face ``datasets`` would copy every file, and
holds a whole row group while it does; tests/benchmarks/README.md has the cost.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import DataError, ResourceError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from datasets import Features

MAX_GROUP_BYTES = 16 * 2**20
MAX_GROUP_ROWS = 2048
"""Larger row groups are split: decoding one takes some 10 ms, and one of repeated values may unfold to any size."""
COPY_GROUP_BYTES = 2**20
CACHE_BYTES = 64 * 2**20
_BATCH_ROWS = 64
_BUFFER_BYTES = 2**20


class ParquetRows:
    """The rows of parquet files, in order; keeps the row groups read last, up to ``CACHE_BYTES``.

    Raises:
        DataError: A file is no parquet, or two of its columns have one name.
        ResourceError: There is no room to split large row groups.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._groups = [group for file in files for group in _groups(file)]
        self._starts = [0, *accumulate(group.num_rows for group in self._groups)]
        schemas = {group.path: group.schema for group in self._groups}.values()
        self.columns = tuple(dict.fromkeys(name for schema in schemas for name in schema.names))
        features = [_features(schema) for schema in schemas]
        self.image_columns = tuple(
            dict.fromkeys(name for each in features for name, feature in each.items() if _is_image(feature))
        )
        self._decode = _json_decoder(next(iter(schemas), None))
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._table_bytes = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> dict[str, Any]:
        """The cells of one row.

        Raises:
            DataError: The file has become damaged or is gone.
        """
        group = bisect_right(self._starts, index) - 1
        [stored] = self._table(group).slice(index - self._starts[group], 1).to_pylist()
        cells = self._decode(stored)
        return {name: cells.get(name) for name in self.columns}

    def _table(self, group: int) -> pa.Table:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group]
        table = self._groups[group].read()
        self._tables[group] = table
        self._table_bytes += table.nbytes
        while self._table_bytes > CACHE_BYTES and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self._table_bytes -= oldest.nbytes
        return table


@dataclass(frozen=True, slots=True)
class _Group:
    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema
    index: int

    @property
    def num_rows(self) -> int:
        return int(self.metadata.row_group(self.index).num_rows)

    def read(self) -> pa.Table:
        import pyarrow.parquet as pq

        with _arrow_errors(self.path):
            file = pq.ParquetFile(self.path, metadata=self.metadata, pre_buffer=False)
            return file.read_row_group(self.index, use_threads=False)


def _groups(path: Path) -> Iterator[_Group]:
    """The row groups of a file, or of its copy with smaller ones, leaving out empty ones."""
    import pyarrow.parquet as pq

    with _arrow_errors(path):
        file = pq.ParquetFile(path)
        metadata, schema = file.metadata, file.schema_arrow
        if len(set(schema.names)) < len(schema.names):
            raise DataError("Two columns have the same name", where=str(path), possible=", ".join(schema.names))
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        if any(each.total_byte_size > MAX_GROUP_BYTES or each.num_rows > MAX_GROUP_ROWS for each in groups):
            path = _split(path)
            metadata = pq.read_metadata(path)
    for index in range(metadata.num_row_groups):
        if metadata.row_group(index).num_rows:
            yield _Group(path, metadata, schema, index)


def _split(path: Path) -> Path:
    """A copy with small row groups, in the cache of the hub; made again only if the file has changed."""
    from huggingface_hub import constants

    stat = path.stat()
    name = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    copy = Path(constants.HF_HOME) / "mmrl" / "row_groups" / f"{name}.parquet"
    if not copy.exists():
        temporary = copy.with_name(f".{copy.name}.{os.getpid()}")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            _rewrite(path, temporary)
            temporary.replace(copy)
        except OSError as error:
            # A damaged source is an OSError of pyarrow's without a number.
            if error.errno is None:
                raise
            raise ResourceError(
                f"A copy of the parquet file with smaller row groups cannot be written: {error.strerror}",
                where=f"{path}, to {copy.parent}",
                remedy="make room there, set HF_HOME to another folder, or write the file with smaller row groups",
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink()
    return copy


def _rewrite(source: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Buffered, batch by batch: a column chunk of any size is never in memory at once.
    file = pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    schema = file.schema_arrow
    with pq.ParquetWriter(target, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        held: list[pa.RecordBatch] = []
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"The parquet file cannot be read: {reason}",
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
