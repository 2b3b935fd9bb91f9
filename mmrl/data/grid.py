"""The sizes that a model's image processor leaves alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from mmrl.errors import ConfigError, DataError

MAX_ASPECT_RATIO = 200


class ImageSizes(Protocol):
    """The sizes that a model takes without resizing."""

    @property
    def min_pixels(self) -> int:
        """``data.min_pixels``."""

    @property
    def max_pixels(self) -> int:
        """``data.max_pixels``."""

    def size(self, width: int, height: int, *, where: str = "") -> tuple[int, int]:
        """(width, height) to resize to: a size that the same rule leaves alone.

        Raises:
            DataError: There is none for an image of these sides.
        """


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Implements ``ImageSizes`` for models that take one grid of patches, such as Qwen-VL.

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

        A side that shrinking would bring to 0 is one cell, as in transformers.
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
