"""Pixels of the prompt's own images at full resolution, and results in a size that a policy can read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mmrl.data.images import normalise
from mmrl.types import RawImage

if TYPE_CHECKING:
    from PIL import Image as PILImage

MAX_ASPECT_RATIO = 50
"""Narrower pictures are of no use to a policy, and models refuse those above 200."""


class _AsItIs:
    """Sizes of ``ImageSizes`` without a limit: no image is resized."""

    min_pixels = 1
    max_pixels = 2**31

    def size(self, width: int, height: int, *, where: str = "") -> tuple[int, int]:
        return width, height


def full_size(raw: RawImage) -> PILImage.Image:
    """The image upright, RGB on white, in its own size.

    Raises:
        DataError: It cannot be decoded, or is too large.
    """
    return normalise(raw, _AsItIs())


def fitted(image: PILImage.Image, min_side: int, max_pixels: int) -> PILImage.Image:
    """The image enlarged until its shorter side has ``min_side`` pixels, or shrunk to ``max_pixels``, which wins."""
    width, height = image.size
    scale = max(1.0, min_side / min(width, height))
    scale = min(scale, math.sqrt(max_pixels / (width * height)))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return resized(image, size)


def resized(image: PILImage.Image, size: tuple[int, int]) -> PILImage.Image:
    from PIL.Image import Resampling

    return image if image.size == size else image.resize(size, Resampling.BICUBIC)
