"""Lists within lists of what a model or an environment wrote, as deep as functions that call themselves can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 100
"""Lists and mappings within each other; what is deeper is left out."""


def bounded(value: Any) -> Any:
    """The value; None if it is nested so deeply that functions which call themselves cannot read it."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [inner for each in layer for inner in _within(each)]
        if not layer:
            return value
    return None


def _within(value: Any) -> Sequence[Any]:
    match value:
        case Mapping():
            return list(value.values())
        case list() | tuple():
            return value
        case _:
            return ()
