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

    The last step is kept, and those of metrics that fewer than half of the steps have, such as evaluations, unless they
    alone take more.

    Returns:
        The documents, and the number of steps of which one is kept.
    """
    size = _size(documents)
    if size <= room:
        return dict(documents), 1
    for keeps_rare in (True, False):
        every = max(2, math.ceil(size / max(room, 1)))
        while every <= _MOST:
            found = {name: _with_steps(each, every, keeps_rare) for name, each in documents.items()}
            if _size(found) <= room:
                return found, every
            every += max(1, every // 4) if every < max(map(_steps_of, documents.values())) else _MOST
    return found, every


def _steps_of(document: Document) -> int:
    return len(document.get("steps", ()))


def _size(documents: Mapping[str, Document]) -> int:
    return sum(len(json.dumps(each)) for each in documents.values())


def _with_steps(document: Document, every: int, keeps_rare: bool) -> Document:
    steps, curves = document.get("steps", []), document.get("curves", {})
    kept = {*range(0, len(steps), every), len(steps) - 1} & set(range(len(steps)))
    rare = [curve for curve in curves.values() if keeps_rare and _is_rare(curve)]
    kept |= {place for curve in rare for place, value in enumerate(curve) if value is not None}
    places = sorted(kept)
    return {
        **document,
        "steps": [steps[place] for place in places],
        "curves": {name: [curve[place] for place in places] for name, curve in curves.items()},
    }


def _is_rare(curve: Sequence[float | None]) -> bool:
    return 2 * sum(value is not None for value in curve) < len(curve)
