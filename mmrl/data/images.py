"""Images: normalised once, by one function, and addressed by what they show.

Sampler and learner both read the pixels that ``MediaStore`` holds, so a row's hash vouches for what each of them
saw. The size after normalisation follows from a file's header alone: prompts are measured without decoding.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.types import ImageRef, RawImage

if TYPE_CHECKING:
    from PIL import Image as PILImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
MAX_ASPECT_RATIO = 200
MID_GREY = (128, 128, 128)
_GREY_STEP = {"L;2": 85, "L;4": 17}
"""What Pillow multiplies grey of 2 and 4 bits by."""
_DROP = "repair the image or remove the row"
_RESTORE = "delete the file and start again: it is then written anew from the dataset"


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The sizes that a model takes without resizing.

    Attributes:
        factor: Both sides are multiples of it: patch size times merge size.
        min_pixels: Smaller images are enlarged to at least this area.
        max_pixels: Larger images are shrunk to at most this area.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if not (self.factor > 0 and max(self.min_pixels, self.factor**2) <= self.max_pixels):
            raise ConfigError(
                f"No image fits between {self.min_pixels} and {self.max_pixels} pixels in cells of {self.factor}",
                where="data.min_pixels, data.max_pixels",
                possible=f"min_pixels <= max_pixels, and max_pixels of at least {self.factor**2}",
            )

    def size(self, width: int, height: int, *, where: str = "") -> tuple[int, int]:
        """(width, height) to resize to: a size that the same rule leaves alone.

        Raises:
            DataError: A side of one pixel, an aspect ratio above 200, or no size within the pixel limits.
        """
        size = (width, height)
        for _ in range(8):
            if min(size) < 2 or max(size) > MAX_ASPECT_RATIO * min(size):
                raise DataError(
                    f"An image of {width}x{height} pixels is too narrow",
                    where=where,
                    possible=f"sides of 2 pixels and more, and an aspect ratio up to {MAX_ASPECT_RATIO}",
                    remedy="crop or pad the image, or remove the row",
                )
            previous, size = size, self._step(*size)
            if size == previous:
                return size
        raise DataError(
            f"An image of {width}x{height} pixels has no size of {self.min_pixels} to {self.max_pixels} pixels "
            f"in cells of {self.factor}",
            where=where,
            remedy="move data.min_pixels and data.max_pixels further apart",
        )

    def _step(self, width: int, height: int) -> tuple[int, int]:
        """One application of qwen_vl_utils.smart_resize, which cannot be imported without torch.

        Where shrinking a narrow image would leave a side of 0, it is one cell, as in transformers.
        """
        factor = self.factor
        columns, rows = max(1, round(width / factor)), max(1, round(height / factor))
        if columns * rows * factor**2 > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            columns = max(1, math.floor(width / beta / factor))
            rows = max(1, math.floor(height / beta / factor))
        elif columns * rows * factor**2 < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            columns, rows = math.ceil(width * beta / factor), math.ceil(height * beta / factor)
        return columns * factor, rows * factor


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image file says of itself.

    Attributes:
        format: One of ``FORMATS``.
        mode: Pillow's name for the kind of its pixels.
        width: Pixels, turned upright.
        height: Pixels, turned upright.
        transparent: Whether pixels may be transparent; they are shown on white.
    """

    format: str
    mode: str
    width: int
    height: int
    transparent: bool


def read_header(raw: RawImage) -> ImageHeader:
    """What the file says of itself; decodes nothing.

    Raises:
        DataError: No image of a known format, or too large.
    """
    with _pillow_errors(raw.label):
        image, orientation = _open(raw)
        size = _upright_size(image, orientation)
        return ImageHeader(image.format or "?", image.mode, *size, image.has_transparency_data)


def normalised_size(raw: RawImage, grid: ImageGrid) -> tuple[int, int]:
    """(width, height) of ``normalise(raw, grid)``, from the header alone.

    Raises:
        DataError: No image of a known format, too large, or too narrow.
    """
    with _pillow_errors(raw.label):
        image, orientation = _open(raw)
        return grid.size(*_upright_size(image, orientation), where=raw.label)


def normalise(raw: RawImage, grid: ImageGrid) -> PILImage.Image:
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


class MediaStore:
    """A folder of normalised images, each under the hash of its pixels; may be used from several threads.

    Args:
        folder: Where the PNG files lie; created with the first image.
        grid: What images are resized to.
        cache_bytes: Decoded pixels kept in memory, least recently used first out.
    """

    def __init__(self, folder: Path, grid: ImageGrid, cache_bytes: int = 256 * 2**20) -> None:
        self.folder = folder.absolute()
        self.grid = grid
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, PILImage.Image] = OrderedDict()
        self._lock = threading.Lock()  # of the cache
        self._refs: dict[bytes, ImageRef] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has a cache of its own."""
        return MediaStore, (self.folder, self.grid, self._cache_bytes)

    def add(self, raw: RawImage) -> ImageRef:
        """The reference of an image; decodes and writes each distinct one once.

        Raises:
            DataError: The image cannot be used; names ``raw.label``.
            ResourceError: The file cannot be written.
        """
        key = hashlib.sha256(raw.data).digest()
        if key not in self._refs:
            self._refs[key] = self._keep(normalise(raw, self.grid))
        return self._refs[key]

    def blank(self, ref: ImageRef) -> ImageRef:
        """The reference of a mid-grey image of the same size, which tells nothing else of the one behind ``ref``.

        Raises:
            ResourceError: The file cannot be written.
        """
        from PIL import Image

        return self._keep(Image.new("RGB", (ref.width, ref.height), MID_GREY))

    def load(self, ref: ImageRef) -> PILImage.Image:
        """The pixels behind a reference; shared, so do not draw on them.

        Raises:
            DataError: The file is gone, or does not hold these pixels.
        """
        with self._lock:
            image = self._cache.get(ref.hash)
            if image is not None:
                self._cache.move_to_end(ref.hash)
        if image is None:
            image = self._read(ref)
            self._remember(ref.hash, image)
        return image

    def read_file(self, name: str) -> bytes:
        """The PNG file of the image with this hash.

        Raises:
            DataError: It is gone.
        """
        path = self.folder / f"{name}.png"
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(
                f"A stored image cannot be read: {error.strerror}", where=str(path), remedy=_RESTORE
            ) from error

    def write_file(self, name: str, data: bytes) -> None:
        """Take over a file that ``read_file`` of another store gave.

        Raises:
            ResourceError: It cannot be written.
        """
        _write_whole(self.folder / f"{name}.png", lambda path: path.write_bytes(data))

    def _keep(self, image: PILImage.Image) -> ImageRef:
        name = _pixel_hash(image)
        path = self.folder / f"{name}.png"
        if not path.exists():
            _write_whole(path, lambda to: image.save(to, "PNG", compress_level=1))
        self._remember(name, image)
        return ImageRef(hash=name, width=image.width, height=image.height, path=str(path))

    def _read(self, ref: ImageRef) -> PILImage.Image:
        path = str(self.folder / f"{ref.hash}.png")
        image = normalise(RawImage(self.read_file(ref.hash), label=path), self.grid)
        if _pixel_hash(image) != ref.hash:
            raise DataError("A stored image does not hold the pixels of its hash", where=path, remedy=_RESTORE)
        return image

    def _remember(self, name: str, image: PILImage.Image) -> None:
        with self._lock:
            if name in self._cache:
                return
            self._cache[name] = image
            self._cached_bytes += _num_bytes(image)
            while self._cached_bytes > self._cache_bytes:
                _, evicted = self._cache.popitem(last=False)
                self._cached_bytes -= _num_bytes(evicted)


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
        image = _eight_bit(image)
    elif image.mode in ("I", "F"):
        raise DataError(
            "The image has 32-bit or floating-point pixels, whose range is not defined",
            where=label,
            possible="8 or 16 bits per channel",
            remedy="convert the image to 8 bits",
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    _mend_transparent_colour(image)
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _mend_transparent_colour(image: PILImage.Image) -> None:
    """Bring a PNG's transparent colour to the 8 bits that its pixels are decoded to, which Pillow does not do.

    It leaves shallow grey as it is in the file, and 16-bit colour, of which the high bytes are all that is compared.
    """
    from PIL.PngImagePlugin import PngImageFile

    if not (isinstance(image, PngImageFile) and image.tile and "transparency" in image.info):
        return
    stored, colour = image.tile[0].args, image.info["transparency"]
    if stored in _GREY_STEP:
        image.info["transparency"] = colour * _GREY_STEP[stored]
    elif stored == "RGB;16B":
        image.info["transparency"] = tuple(channel >> 8 for channel in colour)


def _eight_bit(image: PILImage.Image) -> PILImage.Image:
    """The high byte of 16-bit grey, as Pillow itself does for 16-bit colour; the transparent grey becomes white."""
    from PIL import Image

    grey = np.asarray(image)
    pixels = (grey >> 8).astype(np.uint8)
    if "transparency" in image.info:
        pixels[grey == image.info["transparency"]] = 255
    return Image.fromarray(pixels)


@contextmanager
def _pillow_errors(label: str) -> Iterator[None]:
    """Whatever Pillow raises on foreign bytes, as a DataError; its warnings are about harmless metadata."""
    from PIL import UnidentifiedImageError

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # filters are the process's, whoever sets them
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


def _pixel_hash(image: PILImage.Image) -> str:
    return hashlib.sha256(f"{image.width}x{image.height}".encode() + image.tobytes()).hexdigest()


def _num_bytes(image: PILImage.Image) -> int:
    return 3 * image.width * image.height


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is either whole or absent, also when several processes write the same one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ResourceError(
            f"An image cannot be stored: {error.strerror or error}", where=str(path), remedy="free disk space"
        ) from error
