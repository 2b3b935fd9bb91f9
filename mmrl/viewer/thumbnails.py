"""The pictures of a report: small enough to lie within one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from mmrl.viewer.folder import ViewedRun

SIDE = 256
"""Pixels of a thumbnail's longer side."""
SHRUNK = "data:image/jpeg;base64,"
"""The beginning of a picture that is smaller here than in the run."""
_SMALL = 6000
"""Bytes of a PNG file that is its own thumbnail."""
_MOST_PIXELS = 2**26


def thumbnails(run: ViewedRun, document: Any) -> dict[str, str]:
    """A data URI for each image that a document names, by hash; those that cannot be read are missing."""
    names = dict.fromkeys(_hashes(document))
    return {name: uri for name in names if (uri := _thumbnail(run, name)) is not None}


def _hashes(value: Any) -> Iterator[str]:
    """The hash of each image in a document."""
    if isinstance(value, dict):
        if {"hash", "width", "height"} <= value.keys() and isinstance(value["hash"], str):
            yield value["hash"]
        for inner in value.values():
            yield from _hashes(inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for inner in value:
            yield from _hashes(inner)


def _thumbnail(run: ViewedRun, name: str) -> str | None:
    from PIL import Image

    with suppress(Exception):  # Pillow's decoders raise whatever they like, of a file that may be hostile
        data = run.image(name)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if len(data) <= _SMALL and max(image.size) <= SIDE:
                return f"data:image/png;base64,{base64.b64encode(data).decode()}"
            if image.width * image.height > _MOST_PIXELS:
                return None
            small = image.convert("RGB")
            small.thumbnail((SIDE, SIDE))
            file = io.BytesIO()
            small.save(file, "JPEG", quality=80)
        return SHRUNK + base64.b64encode(file.getvalue()).decode()
    return None
