"""The type of documents, the texts that tables cut, and the error for what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.errors import DataError

Document = Any
"""Plain values that JSON can hold, once ``Redactor.plain`` has made NaN and infinity null."""
HEAD = 200
"""Characters of a text in a table."""
LONG_HEAD = 500
"""Characters of a question and of a completion in the history of a prompt."""


class NotThere(DataError):
    """There is no such run, step, group or picture."""


def head(text: str | None, length: int = HEAD) -> str | None:
    """The beginning of a text."""
    return text if text is None or len(text) <= length else text[:length] + "…"


def dotted(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of mappings and lists, with its keys joined by dots; an empty mapping or list is a leaf."""
    items: list[tuple[Any, Any]] = []
    if isinstance(values, Mapping):
        items = list(values.items())
    elif isinstance(values, list | tuple):
        items = list(enumerate(values))
    if not items:
        yield prefix, values
    for key, value in items:
        yield from dotted(value, f"{prefix}.{key}" if prefix else str(key))
