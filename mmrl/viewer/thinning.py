"""Curves with fewer steps, for a file that must not be larger than its limit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from mmrl.viewer.documents import Document

_MOST = 2**16
"""One step of so many at the least: a curve's two ends."""


def thinned(documents: Mapping[str, Document], room: int) -> tuple[dict[str, Document], int]:
    """Documents of metrics that take no more than so many bytes of JSON, all with one step of as many.

    The last step is kept, and as long as that fits the steps of metrics that fewer than half of the steps have, such as
    those of evaluations.

    Returns:
        The documents, and the number of steps of which one is kept.
    """
    every, found, size = 1, dict(documents), _size(documents)
    while size > room and every < _MOST:
        every = math.ceil(every * max(size / max(room, 1), 1.2))
        found = {name: _with_steps(each, every) for name, each in documents.items()}
        size = _size(found)
    return found, every


def _size(documents: Mapping[str, Document]) -> int:
    return sum(len(json.dumps(each)) for each in documents.values())


def _with_steps(document: Document, every: int) -> Document:
    steps, curves = document.get("steps", []), document.get("curves", {})
    kept = {*range(0, len(steps), every), len(steps) - 1} & set(range(len(steps)))
    rare = {
        place for curve in curves.values() if _is_rare(curve) for place, value in enumerate(curve) if value is not None
    }
    places = sorted(kept | rare if len(rare) <= len(kept) else kept)
    return {
        **document,
        "steps": [steps[place] for place in places],
        "curves": {name: [curve[place] for place in places] for name, curve in curves.items()},
    }


def _is_rare(curve: Sequence[float | None]) -> bool:
    return 2 * sum(value is not None for value in curve) < len(curve)
