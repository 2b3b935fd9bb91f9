"""Image files as models see them: upright, RGB on white, in a size of the grid.

The size follows from a file's header alone: prompts are measured without decoding.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.data.grid import ImageSizes
from mmrl.errors import DataError
from mmrl.types import RawImage

if TYPE_CHECKING:
    from PIL import Image as PILImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
_DROP = "repair the image or remove the row"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The facts in an image file's header.

    Attributes:
        format: One of ``FORMATS``.
        mode: Pillow's name for the kind of its pixels.
        width: Pixels, turned upright.
        height: Pixels, turned upright.
        transparent: True if pixels may be transparent; they are shown on white.
    """

    format: str
    mode: str
    width: int
    height: int
    transparent: bool


def read_header(raw: RawImage) -> ImageHeader:
    """The header of a file; decodes nothing.

    Raises:
        DataError: No image of a known format, or too large.
    """
    with _pillow_errors(raw.label):
        image, orientation = _open(raw)
        size = _upright_size(image, orientation)
        return ImageHeader(image.format or "?", image.mode, *size, image.has_transparency_data)


def normalised_size(raw: RawImage, grid: ImageSizes) -> tuple[int, int]:
    """(width, height) of ``normalise(raw, grid)``, from the header alone.

    Raises:
        DataError: No image of a known format, too large, or too narrow.
    """
    with _pillow_errors(raw.label):
        image, orientation = _open(raw)
        return grid.size(*_upright_size(image, orientation), where=raw.label)


def normalise(raw: RawImage, grid: ImageSizes) -> PILImage.Image:
    """The image as models see it: upright, RGB on white, the first frame, resized once to the grid.

    Idempotent: what it returns, saved without loss, comes back unchanged.

    Raises:
        DataError: As ``normalised_size``; or the pixels cannot be decoded.
    """
    from PIL.Image import Resampling

    with _pillow_errors(raw.label):
        image, orientation = _open(raw)
        target = grid.size(*_upright_size(image, orientation), where=raw.label)
        image = _turn(_rgb(image, raw.label), orientation)
        if image.size != target:
            image = image.resize(target, Resampling.BICUBIC)
        image.info = {}  # colour profiles and the like would travel into the stored file
        return image


def upright(image: PILImage.Image) -> PILImage.Image:
    """The image as its EXIF says to show it."""
    return _turn(image, _orientation(image))


def _open(raw: RawImage) -> tuple[PILImage.Image, int]:
    """The image, not yet decoded, and the EXIF orientation that remains to be applied."""
    from PIL import Image

    if len(raw.data) > MAX_IMAGE_BYTES:
        raise DataError(
            f"The image file has {len(raw.data)} bytes",
            where=raw.label,
            possible=f"up to {MAX_IMAGE_BYTES} bytes",
            remedy=_DROP,
        )
    image = Image.open(io.BytesIO(raw.data), formats=FORMATS)
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise DataError(
            f"The image has {image.width}x{image.height} pixels",
            where=raw.label,
            possible=f"up to {MAX_IMAGE_PIXELS} pixels",
            remedy="shrink the image or remove the row",
        )
    return image, _orientation(image)


def _orientation(image: PILImage.Image) -> int:
    """EXIF orientation, 1 to 8; 1 where the header has none that can be read."""
    from PIL.ExifTags import Base

    # Pillow turns TIFF itself and reports the turned size. Asking a PNG without early EXIF would decode it.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    try:
        value = image.getexif().get(Base.Orientation)
    except Exception:  # a damaged EXIF block: show the image as it is stored, as viewers do
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _upright_size(image: PILImage.Image, orientation: int) -> tuple[int, int]:
    return (image.height, image.width) if orientation >= 5 else (image.width, image.height)


def _turn(image: PILImage.Image, orientation: int) -> PILImage.Image:
    from PIL.Image import Transpose as T

    turns = (
        T.FLIP_LEFT_RIGHT, T.ROTATE_180, T.FLIP_TOP_BOTTOM, T.TRANSPOSE, T.ROTATE_270, T.TRANSVERSE, T.ROTATE_90
    )  # fmt: skip
    return image.transpose(turns[orientation - 2]) if orientation > 1 else image


def _rgb(image: PILImage.Image, label: str) -> PILImage.Image:
    """Decoded pixels in RGB, transparent ones blended with white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        # The high byte, as Pillow itself takes of 16-bit colour.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise DataError(
            "The image has 32-bit or floating-point pixels, whose range is not defined",
            where=label,
            possible="8 or 16 bits per channel",
            remedy="convert the image to 8 bits",
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


@contextmanager
def _pillow_errors(label: str) -> Iterator[None]:
    """Turn any error of Pillow on foreign bytes into a DataError; its warnings are about harmless metadata."""
    from PIL import UnidentifiedImageError

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # filters hold for the whole process
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        try:
            yield
        except DataError:
            raise
        except UnidentifiedImageError as error:
            raise DataError(
                "These bytes are no image that can be read", where=label, possible=", ".join(FORMATS), remedy=_DROP
            ) from error
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise DataError(f"The image cannot be decoded: {cause}", where=label, remedy=_DROP) from error
