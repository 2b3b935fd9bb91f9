"""Writes the Geometry3K layout: ``problem``, ``images`` (list of bytes and path), ``answer``, ``solution``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import DataError, ResourceError

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL import Image as PILImage


@dataclass(frozen=True, slots=True)
class Example:
    """A question about one image, and a short answer."""

    problem: str
    image: bytes
    answer: str


def png(image: PILImage.Image) -> bytes:
    """The image as a PNG file; equal images give equal bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_splits(folder: Path, splits: Mapping[str, Sequence[Example]]) -> None:
    """Write ``<split>.parquet`` for each split that has rows. Writing the same rows again changes nothing.

    Raises:
        DataError: The folder holds other rows under these names.
        ResourceError: The folder cannot be written.
    """
    tables = {folder / f"{split}.parquet": _table(split, rows) for split, rows in splits.items() if rows}
    for path, table in tables.items():
        if path.exists() and not _holds(path, table):
            raise DataError(
                "This file holds other rows than those to be written",
                where=str(path),
                remedy="choose another folder or delete the file",
            )
    for path, table in tables.items():
        if not path.exists():
            _write(path, table)


def _table(split: str, rows: Sequence[Example]) -> pa.Table:
    import pyarrow as pa

    schema = pa.schema(
        {
            "problem": pa.string(),
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "answer": pa.string(),
            "solution": pa.string(),
        }
    )
    cells = [
        {
            "problem": row.problem,
            "images": [{"bytes": row.image, "path": f"{split}-{index}.png"}],
            "answer": row.answer,
            "solution": f"\\boxed{{{row.answer}}}",
        }
        for index, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(cells, schema=schema)


def _holds(path: Path, table: pa.Table) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return bool(pq.read_table(path).equals(table))
    except (pa.ArrowException, OSError):
        return False


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ResourceError(f"The dataset cannot be written: {error}", where=str(path)) from error
