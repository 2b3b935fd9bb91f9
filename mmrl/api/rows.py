"""Rows of this process as a parquet file that dataset loaders read, images included."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.data.floats import listed
from mmrl.data.images import upright
from mmrl.errors import ConfigError, DataError
from mmrl.runs.files import making, writing

_GROUP_ROWS = 64
"""Rows that are decoded together: they may hold images."""
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"}


def write_rows(rows: Iterable[Any], folder: Path, split: str = "train", argument: str = "dataset") -> Path:
    """Write the rows to a parquet file of the split's name, in a folder of ``folder`` that is named by their content.

    An image of Pillow is written as a PNG file, a ``Path`` as the file's bytes, and bytes as they are, each as a struct
    of bytes and path; arrays become lists.

    Raises:
        ConfigError: A row is no mapping, or there can be no such folder.
        DataError: There are none, an image cannot be read, a value cannot be written, or a column holds values of
            several kinds.
        ResourceError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, buffer = pa.table(_columns(rows, argument)), io.BytesIO()
    pq.write_table(table, buffer, row_group_size=_GROUP_ROWS)
    data = buffer.getvalue()
    path = folder / f"rows-{hashlib.sha256(data).hexdigest()[:12]}" / f"{split}.parquet"
    if not path.exists():
        temporary = path.with_suffix(".new")
        with making(folder.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path):
            temporary.write_bytes(data)
            temporary.replace(path)
    return path


def _columns(rows: Iterable[Any], argument: str) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"a row is a {type(row).__name__}, and no mapping of columns",
                where=f"{argument}, row {number}",
                possible='rows such as {"problem": "<image>What is it?", "images": [image], "answer": "a cat"}',
            )
        cells.append({str(name): _cell(value, f"{argument}, row {number}, {name}") for name, value in row.items()})
    if not cells:
        raise DataError(f"{argument} has no rows", where=argument, remedy="give some")
    names = dict.fromkeys(name for row in cells for name in row)
    return {name: _column(name, [row.get(name) for row in cells], argument) for name in names}


def _column(name: str, values: list[Any], argument: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfit = (pa.ArrowException, OverflowError, UnicodeError)
    try:
        column = pa.array(values)
        pq.write_table(pa.table({name: column[:0]}), io.BytesIO())  # parquet lacks some types of arrow
    except unfit as error:
        for number, value in enumerate(values):
            try:
                pa.array([value])
            except unfit as alone:
                raise DataError(
                    f"a {type(value).__name__} cannot be written: {alone}",
                    where=f"{argument}, row {number}, {name}",
                    remedy="change the value, write it as text, or leave the column out",
                ) from None
        mixed = isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError)
        raise DataError(
            f"the column {name} {'holds values of several kinds' if mixed else 'cannot be written'}: {error}",
            where=argument,
            remedy="write them alike in all rows, or write the rows to a file and name that in data.train"
            if mixed
            else "leave it out, or give what is empty in it some content",
        ) from None
    return column


def _cell(value: Any, where: str) -> Any:
    """A value as arrow can hold it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value), "path": None}
    if isinstance(value, Path):
        try:
            return {"bytes": value.expanduser().read_bytes(), "path": value.name}
        except OSError as error:
            raise DataError(f"the file {value} cannot be read: {error.strerror}", where=where) from error
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # an image of datasets
            return dict(value)
        return {str(name): _cell(item, where) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cell(item, where) for item in value]
    if hasattr(value, "tolist"):  # numpy's
        return listed(value)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return {"bytes": _png(value, where), "path": None}
    return value


def _png(image: Any, where: str) -> bytes:
    """The image as PNG, turned as EXIF says: PNG of the pixels alone would lose that."""
    buffer = io.BytesIO()
    try:
        image.load()  # this turns a TIFF
        turned = upright(image)
        (turned if turned.mode in _PNG_MODES else turned.convert("RGB")).save(buffer, "PNG")
    except Exception as error:  # it may be closed, or opened from a damaged file: Pillow raises whatever it likes
        raise DataError(f"the image cannot be read: {error or type(error).__name__}", where=where) from error
    return buffer.getvalue()
