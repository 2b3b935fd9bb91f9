"""Recognises pictures in the cells of a column, whatever it is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mmrl_datasets.images import ADDRESS, BASE64, KEYS, image_cells
from mmrl_datasets.lookalikes import is_conversation

_MAGIC = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*"
    rb"|\0\0\0.ftyp(?:avi[fs]|hei[cx]|mif1|msf1)|\0\0\0\x0cjP  ",
    re.DOTALL,
)
_FILE = re.compile(
    r"[^\n\r\t]{0,1000}\.(?:png|jpe?g|jfif|webp|gif|bmp|tiff?|avif|hei[cf]|svg|p[bgnp]m|jp2|jxl|ico|tga|apng)(?:[?#]\S{0,1000})?",
    re.IGNORECASE,
)
_MOVING = re.compile(r"[^\n\r\t]{0,1000}\.(?:mp4|mkv|webm|avi|mov|wav|mp3|flac|ogg|m4a)", re.IGNORECASE)
_NAME = re.compile(r"im(?:age|g)|pic|photo|screen|figure|(?:png|jpe?g)", re.IGNORECASE)
_CELLS, _DEPTH, _SIDE = 8, 3, 8
"""Cells of a list and levels of structs that are looked at; shortest side of nested numbers that are a picture."""

ENCODED = ("encoded images", "images", "pixels")
"""Forms that are nothing but pictures."""
ADDRESSES, MEDIA = "addresses of images", "videos or sounds"


def forms_in(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """The columns and fields of a cell that hold pictures, or other media, and in which form."""
    if form := form_of(value, name):
        yield name, form
    elif isinstance(value, Mapping) and depth:
        for key, inner in value.items():
            yield from forms_in(inner, f"{name}.{key}", depth - 1)
    elif isinstance(value, list) and depth and not is_conversation(value):
        structs = [each for each in value[:_CELLS] if isinstance(each, Mapping)]
        for key in dict.fromkeys(key for each in structs for key in each):
            yield from forms_in([each.get(key) for each in structs], f"{name}.{key}", depth - 1)


def form_of(value: Any, name: str = "") -> str:
    """The form in which a cell holds pictures, such as ``paths of images``; empty if it holds none."""
    try:
        cells = image_cells(value)
    except ValueError:  # ragged arrays
        return ""
    return next(filter(None, (_form(cell, name) for cell in cells[:_CELLS])), "")


def _form(cell: Any, name: str) -> str:
    if isinstance(cell, Mapping):
        return next((form for key in KEYS if (form := _form_within(cell.get(key), name or key))), "")
    if isinstance(cell, (bytes, bytearray, memoryview)):
        return "encoded images" if _MAGIC.match(cell) else ""
    if isinstance(cell, str):
        return _form_of_text(cell, name)
    if hasattr(cell, "save") and hasattr(cell, "mode"):
        return "images"
    return "pixels" if _are_pixels(cell) else ""


def _form_within(value: Any, name: str) -> str:
    return "" if value is None or isinstance(value, list) else _form(value, name)


def _form_of_text(text: str, name: str) -> str:
    if text[:11].lower() == "data:image/" or BASE64.match(text):
        return "encoded images"
    if len(text) > 2000:
        return ""
    if ADDRESS.match(text) and not text.lower().startswith("file://"):
        is_image = _FILE.fullmatch(text) or _NAME.search(name.rpartition(".")[2])
        return ADDRESSES if is_image else MEDIA if _MOVING.fullmatch(text) else ""
    return "paths of images" if _FILE.fullmatch(text) else MEDIA if _MOVING.fullmatch(text) else ""


def _are_pixels(cell: Any) -> bool:
    """True for (height, width, 3 or 4) numbers that are as many as a picture has."""
    if isinstance(cell, np.ndarray):
        return cell.ndim == 3 and cell.shape[2] in (3, 4) and min(cell.shape[:2]) >= _SIDE
    rows = cell if isinstance(cell, list) and len(cell) >= _SIDE else [None]
    first = rows[0] if isinstance(rows[0], list) and len(rows[0]) >= _SIDE else [None]
    return isinstance(first[0], list) and len(first[0]) in (3, 4) and all(type(n) is int for n in first[0])
