"""Images: normalised once, by one function, and addressed by their pixels.

Sampler and learner both read the pixels that ``MediaStore`` holds, so a row's hash vouches for the pixels of both.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data.decode import (
    FORMATS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    ImageHeader,
    normalise,
    normalised_size,
    read_header,
    upright,
)
from mmrl.data.grid import ImageGrid, ImageSizes
from mmrl.errors import DataError, ResourceError
from mmrl.types import ImageRef, RawImage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image as PILImage

__all__ = [
    "FORMATS",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "ImageGrid",
    "ImageHeader",
    "ImageSizes",
    "MediaStore",
    "blank_file",
    "normalise",
    "normalised_size",
    "read_header",
    "upright",
]
MID_GREY = (128, 128, 128)
KNOWN_FILES = 2**16
"""Image files, 37 MB of references, whose stored image is known; an older one is decoded again, which takes 3 ms."""
_RESTORE = "delete the file and start again: it is then written anew from the dataset"


class MediaStore:
    """A folder of normalised images, each under the hash of its pixels; may be used from several threads.

    Args:
        folder: The folder of the PNG files; created with the first image.
        grid: The sizes that images are resized to.
        cache_bytes: Decoded pixels kept in memory, least recently used first out.
    """

    def __init__(self, folder: Path, grid: ImageSizes, cache_bytes: int = 256 * 2**20) -> None:
        self.folder = folder.absolute()
        self.grid = grid
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, PILImage.Image] = OrderedDict()
        self._lock = threading.Lock()  # of the cache and the references
        self._refs: dict[bytes, ImageRef] = {}
        self._passing: set[str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has a cache of its own."""
        return MediaStore, (self.folder, self.grid, self._cache_bytes)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A block after which images are gone that were first stored in it; nothing else may store images meanwhile."""
        self._passing = set()
        try:
            yield
        finally:
            passed, self._passing = self._passing, None
            self._forget(passed)

    def add(self, raw: RawImage) -> ImageRef:
        """The reference of an image; writes each distinct one once, and decodes it once unless many came since.

        Raises:
            DataError: The image cannot be used; names ``raw.label``.
            ResourceError: The file cannot be written.
        """
        key = hashlib.sha256(raw.data).digest()
        ref = self._refs.get(key)
        if ref is None:
            ref = replace(self._keep(normalise(raw, self.grid)), file_size=_file_size(raw))
            with self._lock:
                self._refs[key] = ref
                if len(self._refs) > KNOWN_FILES:
                    del self._refs[next(iter(self._refs))]
        return ref

    def measure(self, raw: RawImage) -> ImageRef:
        """The sizes of an image, from its file's header alone; there are no pixels behind the reference.

        Raises:
            DataError: As ``normalised_size``.
        """
        return ImageRef("", *normalised_size(raw, self.grid), path="", file_size=_file_size(raw))

    def blank(self, ref: ImageRef) -> ImageRef:
        """The reference of a mid-grey image of the same size, which tells nothing else of the one behind ``ref``.

        Raises:
            ResourceError: The file cannot be written.
        """
        from PIL import Image

        return replace(self._keep(Image.new("RGB", (ref.width, ref.height), MID_GREY)), file_size=ref.file_size)

    def view(self, ref: ImageRef, pixels: npt.NDArray[np.uint8]) -> ImageRef:
        """The reference of other pixels (H, W, 3) for those behind ``ref``, normalised if they have another size.

        Raises:
            DataError: The image cannot be used.
            ResourceError: The file cannot be written.
        """
        from PIL import Image

        image = Image.fromarray(pixels)
        if image.size != (ref.width, ref.height):
            file = io.BytesIO()
            image.save(file, "PNG", compress_level=1)
            image = normalise(RawImage(file.getvalue(), label=f"a view of {ref.path}"), self.grid)
        return replace(self._keep(image), file_size=ref.file_size)

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
            if self._passing is not None:
                self._passing.add(name)
        self._remember(name, image)
        return ImageRef(hash=name, width=image.width, height=image.height, path=str(path))

    def _read(self, ref: ImageRef) -> PILImage.Image:
        path = str(self.folder / f"{ref.hash}.png")
        image = normalise(RawImage(self.read_file(ref.hash), label=path), self.grid)
        if _pixel_hash(image) != ref.hash:
            raise DataError("A stored image does not hold the pixels of its hash", where=path, remedy=_RESTORE)
        return image

    def _forget(self, names: set[str]) -> None:
        with self._lock:
            self._refs = {key: ref for key, ref in self._refs.items() if ref.hash not in names}
            for name in names & self._cache.keys():
                self._cached_bytes -= _num_bytes(self._cache.pop(name))
        for name in names:
            with suppress(OSError):  # a file too many disturbs nobody
                (self.folder / f"{name}.png").unlink(missing_ok=True)

    def _remember(self, name: str, image: PILImage.Image) -> None:
        with self._lock:
            if name in self._cache:
                return
            self._cache[name] = image
            self._cached_bytes += _num_bytes(image)
            while self._cached_bytes > self._cache_bytes:
                _, evicted = self._cache.popitem(last=False)
                self._cached_bytes -= _num_bytes(evicted)


def blank_file(raw: RawImage) -> RawImage:
    """The file of a mid-grey image of the same size, for whoever is given images as the dataset has them.

    Raises:
        DataError: The image cannot be used.
    """
    header = read_header(raw)
    return RawImage(_grey_file(header.width, header.height), raw.label)


def _file_size(raw: RawImage) -> tuple[int, int]:
    header = read_header(raw)
    return header.width, header.height


@lru_cache(maxsize=64)
def _grey_file(width: int, height: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), MID_GREY).save(file, "PNG", compress_level=1)
    return file.getvalue()


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
