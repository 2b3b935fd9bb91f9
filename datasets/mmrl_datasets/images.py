"""Image cells, in every form that datasets use, as encoded files that are not yet decoded."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from mmrl.data.images import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from mmrl.errors import DataError
from mmrl.types import RawImage
from mmrl_datasets.links import broken_link

KEYS = ("bytes", "image", "image_url", "url", "path", "base64", "source", "data")
"""Keys of a struct that is an image, the first one that holds something wins."""
FORMS = (
    f"an image, encoded bytes, a relative path, a data: URI, base64, a struct with one of {', '.join(KEYS)}, "
    "or an array (height, width[, channels]) of 0 to 255"
)
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|UklGR|R0lGOD|Qk[0-3]|SUkq|TU0A)[A-Za-z0-9+/\s]{40,}={0,2}\s*\Z")
"""An image file in base64 without a ``data:`` before it, known by the first bytes of its format."""
_FILE = "file://"
_DATA_URI = re.compile(r"data:image/[\w.+-]{1,64}(?:;[\w=.+-]{1,64})*;base64,", re.IGNORECASE)
_CHANNELS = (1, 3, 4)
_SET_ROOT = "set data.image_root to the folder that the paths start from"
_NO_DOTS = "write the path without .., as it is seen from data.image_root, or lay a link to the folder beside the data"


def image_cells(value: Any) -> list[Any]:
    """The cells of an images column: a list's elements, or a single value; null and empty text are none.

    A list or struct may be written as JSON text, as csv tables have it. Lists may be nested; those of numbers are
    arrays. Three levels are one image if the innermost lists are 1, 3 or 4 long, and a list of grey ones otherwise.
    """
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = _parsed(value)
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype == object else value
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, np.ndarray):
        is_one = value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in _CHANNELS)
        return [value] if is_one else list(value)
    if isinstance(value, list):
        depth, innermost = _depth(value)
        if depth == 2 or (depth == 3 and innermost in _CHANNELS):
            return [value]
        is_nested = not depth and any(isinstance(cell, list) for cell in value)
        return [cell for inner in value for cell in image_cells(inner)] if is_nested else value
    return [value]


def read_image(cell: Any, folders: Sequence[Path], label: str) -> RawImage:
    """The encoded file of one cell; other forms of images become a lossless file.

    Args:
        cell: A cell in one of ``FORMS``.
        folders: The folders that paths start from and, by their text, stay below; the first one that has the file wins.
        label: The row and column.

    Raises:
        DataError: The cell has no such form, is an address or a path that leaves ``folders``, or is too large.
    """
    return RawImage(_encoded(cell, folders, label), label)


def within(cell: Mapping[str, Any], label: str) -> Any:
    """The image that a struct holds: the value of the first of ``KEYS``, also in a struct within; None if all are null.

    Raises:
        DataError: The struct has other keys alone.
    """
    value: Any = cell
    while isinstance(value, Mapping):
        held = {str(key): inner for key, inner in value.items() if inner is not None}
        if held and not held.keys() & set(KEYS):
            named = next((key for key in held if key != "type"), "KEY")
            raise DataError(
                f"An image cell has the keys {', '.join(map(_short, held))[:200]}, and none of them is known",
                where=label,
                possible=", ".join(KEYS),
                remedy=f"name the key that holds the image with a dot: data.train.images: COLUMN.{named}",
            )
        value = next((held[key] for key in KEYS if key in held), None)
    return value


def _encoded(cell: Any, folders: Sequence[Path], label: str) -> bytes:
    from PIL import Image

    if isinstance(cell, Mapping):
        cell = within(cell, label)
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, (bytearray, memoryview)):
        return bytes(cell)
    if isinstance(cell, str):
        return _from_text(cell, folders, label)
    if isinstance(cell, Image.Image):
        return _from_pillow(cell, label)
    if isinstance(cell, (list, tuple, np.ndarray)):
        return _from_array(cell, label)
    held = "null" if cell is None else type(cell).__name__
    raise DataError(f"An image cell holds {held}", where=label, possible=FORMS)


def _from_text(text: str, folders: Sequence[Path], label: str) -> bytes:
    if text[:5].lower() == "data:":
        return _from_data_uri(text, label)
    if text[: len(_FILE)].lower() == _FILE:
        text = text[len(_FILE) :]
        # An address has %20 for a blank, and some programs write it as it is.
        plain = unquote(text)
        return _read_below(folders, [text, plain] if plain != text else [text], label)
    if ADDRESS.match(text):
        raise DataError(
            f"The image {_short(text)} is an address, and images are not fetched",
            where=label,
            possible=FORMS,
            remedy="download the images next to the dataset and write their relative paths",
        )
    if BASE64.match(text):
        return _from_base64("".join(text.split()), "The image in base64", label)
    return _read_below(folders, [text], label)


def _from_data_uri(text: str, label: str) -> bytes:
    head = _DATA_URI.match(text)
    if head is None:
        raise DataError("A data: URI holds no image in base64", where=label, possible="data:image/png;base64,...")
    return _from_base64(text[head.end() :], "A data: URI", label)


def _from_base64(text: str, what: str, label: str) -> bytes:
    if len(text) * 3 // 4 > MAX_IMAGE_BYTES:
        raise DataError(f"{what} is too large", where=label, possible=f"up to {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{what} is damaged: {error}", where=label) from error


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


def _read_below(folders: Sequence[Path], spellings: Sequence[str], label: str) -> bytes:
    """Bytes of the first image file that there is.

    A path's text may not leave the folder. Links on the disk are followed: rows do not make them.
    """
    where = f"{label}: {_short(spellings[0])}"
    try:
        paths = [path for text in spellings for folder in folders if (path := _below(folder, text)) is not None]
        if not paths:
            below = " or ".join(map(str, folders)) or "a local dataset's folder, or below image_root"
            raise DataError(
                "The image path does not lie in the dataset's folder",
                where=where,
                possible=f"encoded bytes, or a path to a file below {below}",
                remedy=_NO_DOTS if ".." in Path(spellings[0]).parts else _SET_ROOT,
            )
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            raise _no_file(folders, paths, where)
        with found.open("rb") as stream:
            return stream.read(MAX_IMAGE_BYTES + 1)  # one byte too many is enough to be refused later
    except (OSError, ValueError, RuntimeError) as error:  # a null character, a loop of links
        raise DataError(f"The image {_short(spellings[0])} cannot be read: {error!s:.200}", where=label) from error


def _below(folder: Path, text: str) -> Path | None:
    """The path that a text names, if the text itself does not leave the folder: ``..`` goes back by text alone."""
    plain = os.path.normpath(text)
    if os.path.isabs(plain):
        named = Path(plain)
        if named.is_relative_to(os.path.abspath(folder)) or named.is_relative_to(folder.resolve()):
            return named
        return named if named.resolve().is_relative_to(folder.resolve()) else None
    return None if plain.split(os.sep, 1)[0] == ".." else folder / plain


def _no_file(folders: Sequence[Path], paths: Sequence[Path], where: str) -> DataError:
    """The error about paths without a file, which names a link that leads nowhere."""
    if broken := next(filter(None, map(broken_link, paths)), ""):
        remedy = "mend the link: it may start from another folder, or the disk may not be there"
        return DataError("An image lies behind a broken link", where=f"{where}: {broken}", remedy=remedy)
    possible = f"a file below {' or '.join(map(str, folders))}"
    return DataError("There is no image file of that name", where=where, possible=possible, remedy=_SET_ROOT)


def _parsed(text: str) -> Any:
    """A list or struct that is written as JSON; other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _depth(value: Sequence[Any]) -> tuple[int, int]:
    """Number of lists nested around a number, and the length of the innermost; (0, 0) if it is no number."""
    depth, inner = 0, value
    while isinstance(inner, (list, tuple)) and inner and depth < 8:
        depth, length, inner = depth + 1, len(inner), inner[0]
    is_number = isinstance(inner, (int, np.integer)) and not isinstance(inner, bool)
    return (depth, length) if is_number else (0, 0)


def _short(value: str) -> str:
    return repr(value if len(value) <= 200 else f"{value[:200]}...")
