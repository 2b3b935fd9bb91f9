"""Image cells, in every form that datasets use, as encoded files that are not yet decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.data.images import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from mmrl.errors import DataError
from mmrl.types import RawImage

FORMS = (
    "an image, encoded bytes, a struct of bytes and path, a relative path, a data: URI, "
    "or an array (height, width[, channels]) of 0 to 255"
)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URI = re.compile(r"data:image/[\w.+-]{1,64}(?:;[\w=.+-]{1,64})*;base64,", re.IGNORECASE)
_CHANNELS = (1, 3, 4)
_SET_ROOT = "set data.image_root to the folder that the paths start from"


def image_cells(value: Any) -> list[Any]:
    """The cells of an images column: a list's elements, or a single value; null and empty text are none.

    Nested lists of numbers are arrays. Three levels are one image if the innermost lists are 1, 3 or 4 long, and a
    list of grey ones otherwise.
    """
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype == object else value
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, np.ndarray):
        is_one = value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in _CHANNELS)
        return [value] if is_one else list(value)
    if isinstance(value, list):
        depth, innermost = _depth(value)
        return [value] if depth == 2 or (depth == 3 and innermost in _CHANNELS) else value
    return [value]


def read_image(cell: Any, root: Path | None, label: str) -> RawImage:
    """The encoded file of one cell; other forms of images become a lossless file.

    Args:
        cell: A cell in one of ``FORMS``.
        root: The folder that paths start from and stay below; None if there is none.
        label: The row and column.

    Raises:
        DataError: The cell has no such form, is an address or a path out of ``root``, or is too large.
    """
    return RawImage(_encoded(cell, root, label), label)


def _encoded(cell: Any, root: Path | None, label: str) -> bytes:
    from PIL import Image

    if isinstance(cell, Mapping):
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, (bytearray, memoryview)):
        return bytes(cell)
    if isinstance(cell, str):
        return _from_text(cell, root, label)
    if isinstance(cell, Image.Image):
        return _from_pillow(cell, label)
    if isinstance(cell, (list, tuple, np.ndarray)):
        return _from_array(cell, label)
    held = "null" if cell is None else type(cell).__name__
    raise DataError(f"An image cell holds {held}", where=label, possible=FORMS)


def _from_text(text: str, root: Path | None, label: str) -> bytes:
    if text[:5].lower() == "data:":
        return _from_data_uri(text, label)
    if _ADDRESS.match(text):
        raise DataError(
            f"The image {_short(text)} is an address, and images are not fetched",
            where=label,
            possible=FORMS,
            remedy="download the images next to the dataset and write their relative paths",
        )
    return _read_under(root, text, label)


def _from_data_uri(text: str, label: str) -> bytes:
    head = _DATA_URI.match(text)
    if head is None:
        raise DataError("A data: URI holds no image in base64", where=label, possible="data:image/png;base64,...")
    if (len(text) - head.end()) * 3 // 4 > MAX_IMAGE_BYTES:
        raise DataError("A data: URI is too large", where=label, possible=f"up to {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"A data: URI is damaged: {error}", where=label) from error


def _from_pillow(image: Any, label: str) -> bytes:
    """PNG, or TIFF for the colour spaces that PNG does not have."""
    if image.width * image.height > MAX_IMAGE_PIXELS:
        _too_large(image.width, image.height, label)
    buffer = io.BytesIO()
    in_png = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
    try:
        exif = {"exif": image.getexif()} if in_png and image.getexif() else {}
        image.save(buffer, "PNG" if in_png else "TIFF", **exif)
    except Exception as error:  # a lazily opened file may be damaged, and Pillow raises whatever it likes
        raise DataError(f"The image cannot be decoded: {error or type(error).__name__}", where=label) from error
    return buffer.getvalue()


def _from_array(cell: Any, label: str) -> bytes:
    from PIL import Image

    try:
        array = np.asarray(cell)
    except (ValueError, TypeError, OverflowError):  # ragged
        array = np.zeros(0, object)
    shape_fits = array.ndim in (2, 3) and array.size > 0 and (array.ndim == 2 or array.shape[2] in _CHANNELS)
    if not shape_fits or array.dtype.kind not in "ui" or array.min() < 0 or array.max() > 255:
        raise DataError(
            f"An image cell holds an array of shape {array.shape} and type {array.dtype}",
            where=label,
            possible="(height, width) or (height, width, 1, 3 or 4 channels) of whole numbers from 0 to 255",
        )
    height, width = array.shape[:2]
    if height * width > MAX_IMAGE_PIXELS:
        _too_large(width, height, label)
    pixels = array.astype(np.uint8)
    return _from_pillow(Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels), label)


def _too_large(width: int, height: int, label: str) -> None:
    raise DataError(f"The image has {width}x{height} pixels", where=label, possible=f"up to {MAX_IMAGE_PIXELS} pixels")


def _read_under(root: Path | None, value: str, label: str) -> bytes:
    """Bytes of an image file that lies under ``root``, links followed."""
    shown = _short(value)
    try:
        path = None if root is None else (root / value).resolve()
        if path is None or root is None or not path.is_relative_to(root.resolve()):
            below = "a local dataset's folder, or below image_root" if root is None else f"{root}"
            raise DataError(
                "The image path does not lie in the dataset's folder",
                where=f"{label}: {shown}",
                possible=f"encoded bytes, or a path to a file below {below}",
                remedy=_SET_ROOT,
            )
        if not path.is_file():
            what = "There is no image file of that name"
            raise DataError(what, where=f"{label}: {shown}", possible=f"a file below {root}", remedy=_SET_ROOT)
        with path.open("rb") as stream:
            return stream.read(MAX_IMAGE_BYTES + 1)  # one byte too many is enough to be refused later
    except (OSError, ValueError, RuntimeError) as error:  # a null character, a loop of links
        raise DataError(f"The image {shown} cannot be read: {error!s:.200}", where=label) from error


def _depth(value: Sequence[Any]) -> tuple[int, int]:
    """Number of lists nested around a number, and the length of the innermost; (0, 0) if it is no number."""
    depth, inner = 0, value
    while isinstance(inner, (list, tuple)) and inner and depth < 8:
        depth, length, inner = depth + 1, len(inner), inner[0]
    is_number = isinstance(inner, (int, np.integer)) and not isinstance(inner, bool)
    return (depth, length) if is_number else (0, 0)


def _short(value: str) -> str:
    return repr(value if len(value) <= 200 else f"{value[:200]}...")
