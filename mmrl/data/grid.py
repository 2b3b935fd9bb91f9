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
            if _is_narrow(*size):
                raise _too_narrow(width, height, where)
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


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Implements ``ImageSizes`` for models that cut images into square tiles, such as InternVL.

    An image takes the number of columns and rows that changes its shape least, as in transformers' GotOcr2 processor.

    Attributes:
        side: Pixels of a tile's side.
        min_pixels: An image has tiles of at least this area.
        max_pixels: An image has tiles of at most this area.
        max_tiles: Most tiles that the model's processor cuts.
    """

    side: int
    min_pixels: int
    max_pixels: int
    max_tiles: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            area = self.side**2
            raise ConfigError(
                f"No image fits between {self.min_pixels} and {self.max_pixels} pixels in tiles of {self.side}",
                where="data.min_pixels, data.max_pixels",
                possible=f"min_pixels <= max_pixels, of {area} pixels a tile and 1 to {self.max_tiles} tiles",
                remedy="lower data.min_pixels"
                if self.most
                else f"set data.max_pixels to {area} for one tile, or to {self.max_tiles * area} for the most",
            )

    @property
    def fewest(self) -> int:
        """Fewest tiles of an image."""
        return max(math.ceil(self.min_pixels / self.side**2), 1)

    @property
    def most(self) -> int:
        """Most tiles of an image."""
        return min(self.max_pixels // self.side**2, self.max_tiles)

    def size(self, width: int, height: int, *, where: str = "") -> tuple[int, int]:
        """(width, height) to resize to: whole tiles, which the same rule leaves alone.

        Raises:
            DataError: A side of one pixel, or an aspect ratio above 200.
        """
        if _is_narrow(width, height):
            raise _too_narrow(width, height, where)
        previous, size = (0, 0), self._step(width, height)
        while size != previous:  # where many tiles are allowed, three by three become four by four, and so on
            previous, size = size, self._step(*size)
        return size

    def _step(self, width: int, height: int) -> tuple[int, int]:
        """One application of transformers' get_optimal_tiled_canvas, which cannot be imported without torch."""
        shapes = [(columns, rows) for columns in range(1, self.most + 1) for rows in range(1, self.most // columns + 1)]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            change, area = abs(width / height - columns / rows), columns * rows * self.side**2
            if columns * rows < self.fewest:
                continue
            # Of equal shapes the one with more tiles, unless these are twice the image's area.
            if change < least or (change == least and 2 * width * height > area):
                best, least = (columns, rows), change
        return best[0] * self.side, best[1] * self.side


@dataclass(frozen=True, slots=True)
class BudgetSizes:
    """Implements ``ImageSizes`` for models that give each image about as many tokens, such as Gemma 4.

    An image takes the largest size of its shape that has no more tokens than that, as in transformers' processor. Small
    images are enlarged.

    Attributes:
        side: Pixels of a token's side: patch size times pooling.
        budgets: Numbers of tokens that the model's processor knows, ascending.
        min_pixels: The budget has at least this area.
        max_pixels: Likewise at most.
    """

    side: int
    budgets: tuple[int, ...]
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if not (self.tokens and self.min_pixels <= self.tokens * self.side**2):
            areas = ", ".join(f"{count * self.side**2} for {count} tokens" for count in self.budgets)
            raise ConfigError(
                f"No image fits between {self.min_pixels} and {self.max_pixels} pixels in tokens of {self.side}",
                where="data.min_pixels, data.max_pixels",
                possible=f"max_pixels of at least {areas}; min_pixels of at most that",
                remedy="lower data.min_pixels" if self.tokens else f"raise data.max_pixels to {areas.split()[0]}",
            )

    @property
    def tokens(self) -> int:
        """Most tokens of an image; 0 if no budget fits."""
        return max((count for count in self.budgets if count * self.side**2 <= self.max_pixels), default=0)

    def size(self, width: int, height: int, *, where: str = "") -> tuple[int, int]:
        """(width, height) to resize to: whole tokens, which the same rule leaves alone.

        Raises:
            DataError: A side of one pixel, or an aspect ratio above 200, or so narrow that its shape has no size.
        """
        previous, size = (0, 0), (width, height)
        while size != previous:  # what rounding cut from one side makes room for the other
            if _is_narrow(*size):
                raise _too_narrow(width, height, where)
            previous, size = size, self._step(*size)
        return size

    def _step(self, width: int, height: int) -> tuple[int, int]:
        """One application of transformers' get_aspect_ratio_preserving_size, which cannot be imported without torch."""
        factor = math.sqrt(self.tokens * self.side**2 / (height * width))
        rows, columns = math.floor(factor * height / self.side), math.floor(factor * width / self.side)
        if rows == 0:
            rows, columns = 1, min(width // height, self.tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.tokens), 1
        return columns * self.side, rows * self.side


def _is_narrow(width: int, height: int) -> bool:
    return min(width, height) < 2 or max(width, height) > MAX_ASPECT_RATIO * min(width, height)


def _too_narrow(width: int, height: int, where: str) -> DataError:
    return DataError(
        f"An image of {width}x{height} pixels is too narrow",
        where=where,
        possible=f"sides of 2 pixels and more, and an aspect ratio up to {MAX_ASPECT_RATIO}",
        remedy="crop or pad the image, or remove the row",
    )
