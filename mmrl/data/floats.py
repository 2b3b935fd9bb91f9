"""Numbers of 16 and 32 bits as the shortest decimals that they stand for: 0.1, and not 0.10000000149011612."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Reader = Callable[[Any], Any]
_NARROW = ("float16", "float32")


def listed(value: Any) -> Any:
    """A number or array of numpy, or a tensor, as Python's numbers and lists."""
    if str(getattr(value, "dtype", "")).removeprefix("torch.") not in _NARROW:
        return value.tolist()
    array = np.asarray(value)
    shortest = np.array([float(text) for text in array.ravel().astype(str)], np.float64)
    return shortest.reshape(array.shape).tolist()


def reader_of(kind: pa.DataType) -> Reader | None:
    """Reads the Python values of an arrow type with narrow floats; None for a type without any."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(kind, pa.ExtensionType):
        return reader_of(kind.storage_type)
    if types.is_dictionary(kind):
        return reader_of(kind.value_type)
    if types.is_float16(kind) or types.is_float32(kind):
        narrow = np.float16 if types.is_float16(kind) else np.float32
        return lambda value: None if value is None else float(str(narrow(value)))
    if types.is_map(kind):
        key, item = reader_of(kind.key_type) or _as_it_is, reader_of(kind.item_type) or _as_it_is
        changes = key is not _as_it_is or item is not _as_it_is
        return (lambda value: value and [(key(k), item(v)) for k, v in value]) if changes else None
    if types.is_struct(kind):
        fields = {field.name: reader for field in kind if (reader := reader_of(field.type)) is not None}
        return (lambda value: value and _read(value, fields)) if fields else None
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return None
    if types.is_float32(kind.value_type):  # such as an embedding: arrow is four times faster
        return lambda value: value and pa.array(value, pa.float32()).cast(pa.string()).cast(pa.float64()).to_pylist()
    inner = reader_of(kind.value_type)
    return None if inner is None else lambda value: value and [inner(each) for each in value]


def row_reader(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Reads the cells of rows with this schema."""
    readers = {field.name: reader for field in schema if (reader := reader_of(field.type)) is not None}
    return (lambda cells: _read(cells, readers)) if readers else _as_it_is


def _read(cells: dict[str, Any], readers: dict[str, Reader]) -> dict[str, Any]:
    return cells | {name: reader(cells[name]) for name, reader in readers.items() if name in cells}


def _as_it_is(value: Any) -> Any:
    return value
