"""How models of a kind read images: sizes, tokens, pixels, features. The record of a family names its class.

A form follows the model's own image processor: what it says of an image's size is what that processor makes of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.data.grid import BudgetSizes, ImageGrid, ImageSizes, TileSizes
from mmrl.engine import device
from mmrl.ops.cost import TowerShape

if TYPE_CHECKING:
    import torch
    from PIL import Image as PILImage

Grid = tuple[int, int, int]
"""Frames of an image, and the rows and columns of patches in each."""
Features = tuple["torch.Tensor", ...]
"""An image's features: (image tokens, H) for the language model's first layer, then for each layer that takes more."""
BUDGETS = (70, 140, 280, 560, 1120)
"""Most tokens of an image, as Gemma 4's processor takes them."""


@dataclass(frozen=True, slots=True)
class ImageForm(ABC):
    """How one model reads images. Sizes are those of stored images; 0 x 0 is the smallest image, which is blank.

    Attributes:
        config: The transformers config of the whole model.
        processor: The model's processor; None where no pixels are read.
        multimodal_positions: True if positions have three axes (M-RoPE), which ``get_rope_index`` of the model's body
            computes; the body then wants to know which tokens are an image's.
        packed_tower: True if the tower takes patches of all images as one sequence; False if it takes a batch of images
            of one size.
        blank_value: Each value of the blank image, as the tower's first layer reads it.
    """

    config: Any
    processor: Any = None
    multimodal_positions: ClassVar[bool]
    packed_tower: ClassVar[bool]
    blank_value: ClassVar[float] = 0.0

    @property
    def token_id(self) -> int:
        """The id of an image's placeholder, and of each of its tokens."""
        return int(self.config.image_token_id)

    @property
    def looks_ahead(self) -> bool:
        """True if the tokens of an image see each other in layers with a window; the body then wants to know which
        tokens are an image's."""
        return False

    @property
    @abstractmethod
    def tower(self) -> TowerShape:
        """The vision tower's shape."""

    @abstractmethod
    def sizes(self, min_pixels: int, max_pixels: int) -> ImageSizes:
        """The sizes to which images are normalised, within ``data.min_pixels`` and ``data.max_pixels``."""

    @abstractmethod
    def grid(self, width: int, height: int) -> Grid:
        """The patches of an image."""

    @abstractmethod
    def largest_grid(self, max_pixels: int, max_tokens: int) -> Grid:
        """The patches of about the largest image that fits."""

    def tokens(self, width: int, height: int) -> int:
        """Image tokens of an image."""
        frames, rows, columns = self.grid(width, height)
        return frames * rows * columns // self.tower.merge**2

    def expansion(self, width: int, height: int) -> list[int]:
        """The token ids that the model's processor writes in place of an image's placeholder."""
        return [self.token_id] * self.tokens(width, height)

    @abstractmethod
    def read(self, image: PILImage.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels, and a grid (3,). Pixels of several images are joined along their first axis."""

    def seen(self, grid: Grid) -> tuple[int, int]:
        """Rows of an image's pixels, and values of each, as the tower's first layer reads them."""
        frames, rows, columns = grid
        values = self.tower.patch_values
        return (frames * rows * columns, values) if self.packed_tower else (frames, rows * columns * values)

    def blank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the blank image; here of a tower that takes patches."""
        import torch

        grid = self.grid(0, 0)
        return torch.zeros(grid[1] * grid[2], self.tower.patch_values), torch.tensor(grid)

    def tower_inputs(
        self, body: Any, grids_U3: torch.Tensor, where: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor | int]:
        """Further keyword arguments of ``features``, which follow from the grids.

        Args:
            body: The model without its head.
            grids_U3: Grids in the host's memory.
            where: The torch device of the tower.
            dtype: The tower's element type.
        """
        return {}

    @abstractmethod
    def features(
        self, body: Any, pixels: torch.Tensor, grids_U3: torch.Tensor, derived: Mapping[str, Any]
    ) -> list[Features]:
        """Features of each image, from the model's body."""

    @abstractmethod
    def encoded(self, features: Sequence[Features]) -> Any:
        """The features of a row's images as the body takes them (``mm_encoder_outputs``)."""

    @abstractmethod
    def generate_inputs(self, pixels: torch.Tensor, grids_I3: torch.Tensor) -> dict[str, torch.Tensor]:
        """A prompt's images as transformers' ``generate`` takes them."""

    @abstractmethod
    def processor_arguments(self, sizes: ImageSizes) -> dict[str, Any]:
        """vLLM's ``mm_processor_kwargs``, with which it leaves stored images as they are."""


class OneGrid(ImageForm):
    """Qwen-VL: an image of any size is one grid of patches, of which squares become a token."""

    __slots__ = ()
    multimodal_positions = True
    packed_tower = True

    @property
    def factor(self) -> int:
        """Both sides of a stored image are multiples of this many pixels."""
        vision = self.config.vision_config
        return int(vision.patch_size * vision.spatial_merge_size)

    @property
    def tower(self) -> TowerShape:
        vision, model_type = self.config.vision_config, self.config.model_type
        if model_type == "qwen2_vl":  # here alone the hidden size is that of the language model
            width, out, mlp_width = vision.embed_dim, vision.hidden_size, int(vision.embed_dim * vision.mlp_ratio)
        else:
            width, out, mlp_width = vision.hidden_size, vision.out_hidden_size, vision.intermediate_size
        windowed = model_type == "qwen2_5_vl"
        return TowerShape(
            layers=vision.depth,
            width=width,
            mlp_width=mlp_width,
            mlp_matrices=3 if windowed else 2,
            patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            merge=vision.spatial_merge_size,
            out=out,
            mergers=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
            windowed_layers=vision.depth - len(vision.fullatt_block_indexes) if windowed else 0,
            heads=vision.num_heads,
            window=vision.window_size // (vision.patch_size * vision.spatial_merge_size) if windowed else 0,
        )

    def sizes(self, min_pixels: int, max_pixels: int) -> ImageSizes:
        return ImageGrid(self.factor, min_pixels, max_pixels)

    def grid(self, width: int, height: int) -> Grid:
        patch = self.config.vision_config.patch_size
        return 1, max(height, self.factor) // patch, max(width, self.factor) // patch

    def largest_grid(self, max_pixels: int, max_tokens: int) -> Grid:
        tokens = min(max_pixels // self.factor**2, max_tokens)
        side = max(int(tokens**0.5), 1) * self.config.vision_config.spatial_merge_size
        return 1, side, side

    def read(self, image: PILImage.Image) -> tuple[torch.Tensor, torch.Tensor]:
        # Stored pixels are on the model's grid already: a second resize would only change them.
        inputs = self.processor.image_processor(images=[image], do_resize=False, return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"][0]

    def tower_inputs(
        self, body: Any, grids_U3: torch.Tensor, where: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor | int]:
        """The inputs that the tower would otherwise compute from the grids.

        It would read the grids as plain numbers, and on a GPU the host would wait for all work under way. So the grids
        stay in the host's memory, and so do the bounds of attention where the tower reads those
        (``device.tower_bounds``).
        """
        from transformers import vision_utils as grids

        tower = body.visual
        merge, bounded = tower.config.spatial_merge_size, device.tower_bounds(where, dtype)

        def bounds(ends: torch.Tensor, suffix: str = "") -> dict[str, torch.Tensor | int]:
            found = {f"cu{suffix}_seqlens": device.moved(ends, bounded)}
            return {**found, f"max{suffix}_seqlen": int(ends.diff().max())}

        inputs = bounds(grids.get_vision_cu_seqlens(grids_U3))
        inputs["position_ids"] = device.moved(grids.get_vision_position_ids(grids_U3, merge), where)
        if window := getattr(tower.config, "window_size", None):
            order, ends = grids.get_vision_window_index(grids_U3, merge, window, tower.config.patch_size)
            inputs |= {"window_index": device.moved(order, where), **bounds(ends, "_window")}
        if side := getattr(tower, "num_grid_per_side", None):
            how = (tower.interpolation_mode, tower.interpolation_align_corners)
            places, weights = grids.get_vision_interpolation_indices_and_weights(grids_U3, side, *how, merge)
            inputs |= {"interp_indices": device.moved(places, where), "interp_weights": device.moved(weights, where)}
        return inputs

    def features(
        self, body: Any, pixels: torch.Tensor, grids_U3: torch.Tensor, derived: Mapping[str, Any]
    ) -> list[Features]:
        found = body.get_image_features(pixels, grids_U3, return_dict=True, **derived)
        return list(zip(found.pooler_output, *getattr(found, "deepstack_features", ()), strict=True))

    def encoded(self, features: Sequence[Features]) -> Any:
        first, *deeper = zip(*features, strict=True)
        return SimpleNamespace(pooler_output=first, deepstack_features=deeper)

    def generate_inputs(self, pixels: torch.Tensor, grids_I3: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pixel_values": pixels, "image_grid_thw": grids_I3}

    def processor_arguments(self, sizes: ImageSizes) -> dict[str, Any]:
        return {"size": {"shortest_edge": sizes.min_pixels, "longest_edge": sizes.max_pixels}}


class Tiles(ImageForm):
    """InternVL: an image is cut into square tiles of one size; after several tiles comes the whole image, as one more.

    Each tile is a picture of its own to the tower. The processor writes a token before an image's and one after them.
    """

    __slots__ = ()
    multimodal_positions = False
    packed_tower = False

    @property
    def tower(self) -> TowerShape:
        vision, out = self.config.vision_config, self.config.text_config.hidden_size
        return TowerShape(
            layers=vision.num_hidden_layers,
            width=vision.hidden_size,
            mlp_width=vision.intermediate_size,
            mlp_matrices=2,
            patch_values=vision.num_channels * vision.patch_size[0] ** 2,
            merge=round(1 / self.config.downsample_ratio),
            out=out,
            merger_width=out,
            heads=0,
            class_tokens=1,
            scaled=True,
        )

    @property
    def _side(self) -> int:
        return int(self.config.vision_config.image_size[0])

    def sizes(self, min_pixels: int, max_pixels: int) -> TileSizes:
        return TileSizes(self._side, min_pixels, max_pixels, self.processor.image_processor.max_patches)

    def grid(self, width: int, height: int) -> Grid:
        tiles = max(width // self._side * (height // self._side), 1)
        return self._grid(tiles + (tiles > 1))

    def _grid(self, frames: int) -> Grid:
        patches = self._side // int(self.config.vision_config.patch_size[0])
        return frames, patches, patches

    def largest_grid(self, max_pixels: int, max_tokens: int) -> Grid:
        most = self.sizes(1, max_pixels).most
        return self._grid(max(min(most + (most > 1), max_tokens // self.tokens(0, 0)), 1))

    def expansion(self, width: int, height: int) -> list[int]:
        opening, closing = self.processor.start_image_token_id, self.processor.end_image_token_id
        return [opening, *[self.token_id] * self.tokens(width, height), closing]

    def read(self, image: PILImage.Image) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        tiles = image.width // self._side * (image.height // self._side)
        cut = {"crop_to_patches": True, "min_patches": tiles, "max_patches": tiles}
        inputs = self.processor.image_processor(images=[image], return_tensors="pt", **cut)
        return inputs["pixel_values"], torch.tensor(self.grid(*image.size))

    def blank(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        channels = self.config.vision_config.num_channels
        return torch.zeros(1, channels, self._side, self._side), torch.tensor(self.grid(0, 0))

    def features(
        self, body: Any, pixels: torch.Tensor, grids_U3: torch.Tensor, derived: Mapping[str, Any]
    ) -> list[Features]:
        found = body.get_image_features(pixels, return_dict=True, **derived).pooler_output
        tokens = (grids_U3.prod(1) // self.tower.merge**2).tolist()
        return [(each,) for each in found.flatten(0, 1).split(tokens)]

    def encoded(self, features: Sequence[Features]) -> Any:
        import torch

        return SimpleNamespace(pooler_output=torch.cat([first for (first,) in features]))

    def generate_inputs(self, pixels: torch.Tensor, grids_I3: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pixel_values": pixels}

    def processor_arguments(self, sizes: ImageSizes) -> dict[str, Any]:
        tiles = self.sizes(sizes.min_pixels, sizes.max_pixels)
        return {"crop_to_patches": True, "min_patches": tiles.fewest, "max_patches": tiles.most}


class Budget(ImageForm):
    """Gemma 4: an image of any shape becomes about as many tokens, each the mean of a square of patches.

    The tower takes a batch of images, those of fewer patches padded. The processor writes a token before an image's and
    one after them.
    """

    __slots__ = ()
    multimodal_positions = False
    packed_tower = False
    blank_value = -1.0

    @property
    def looks_ahead(self) -> bool:
        return getattr(self.config.text_config, "use_bidirectional_attention", None) == "vision"

    @property
    def tower(self) -> TowerShape:
        vision = self.config.vision_config
        return TowerShape(
            layers=vision.num_hidden_layers,
            width=vision.hidden_size,
            mlp_width=vision.intermediate_size,
            mlp_matrices=3,
            patch_values=3 * vision.patch_size**2,
            merge=vision.pooling_kernel_size,
            out=self.config.text_config.hidden_size,
            heads=0,
            scaled=True,
            pooled=True,
        )

    @property
    def _side(self) -> int:
        return int(self.config.vision_config.patch_size * self.config.vision_config.pooling_kernel_size)

    def sizes(self, min_pixels: int, max_pixels: int) -> BudgetSizes:
        own = self.processor.image_processor.max_soft_tokens
        return BudgetSizes(self._side, tuple(n for n in BUDGETS if n <= own), min_pixels, max_pixels)

    def grid(self, width: int, height: int) -> Grid:
        patch = int(self.config.vision_config.patch_size)
        return 1, max(height, self._side) // patch, max(width, self._side) // patch

    def largest_grid(self, max_pixels: int, max_tokens: int) -> Grid:
        budget = max((n for n in BUDGETS if n * self._side**2 <= max_pixels), default=1)
        side = max(int(min(budget, max_tokens) ** 0.5), 1) * int(self.config.vision_config.pooling_kernel_size)
        return 1, side, side

    def expansion(self, width: int, height: int) -> list[int]:
        count = self.tokens(width, height)
        return [int(self.config.boi_token_id), *[self.token_id] * count, int(self.config.eoi_token_id)]

    def read(self, image: PILImage.Image) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        inputs = self.processor.image_processor(images=[image], do_resize=False, return_tensors="pt")
        there = inputs["image_position_ids"][0, :, 0] >= 0  # the processor pads
        return inputs["pixel_values"][0][there], torch.tensor(self.grid(*image.size))

    def tower_inputs(
        self, body: Any, grids_U3: torch.Tensor, where: str, dtype: torch.dtype
    ) -> dict[str, torch.Tensor | int]:
        return {"image_position_ids": device.moved(_patch_positions(grids_U3), where)}

    def features(
        self, body: Any, pixels: torch.Tensor, grids_U3: torch.Tensor, derived: Mapping[str, Any]
    ) -> list[Features]:
        found = body.get_image_features(_batched(pixels, grids_U3), return_dict=True, **derived)
        return [(each,) for each in found.pooler_output]

    def encoded(self, features: Sequence[Features]) -> Any:
        return SimpleNamespace(pooler_output=[first for (first,) in features])

    def generate_inputs(self, pixels: torch.Tensor, grids_I3: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = _patch_positions(grids_I3.cpu()).to(pixels.device)
        return {"pixel_values": _batched(pixels, grids_I3.cpu()), "image_position_ids": positions}

    def processor_arguments(self, sizes: ImageSizes) -> dict[str, Any]:
        return {"max_soft_tokens": self.sizes(sizes.min_pixels, sizes.max_pixels).tokens}


def _patch_positions(grids_U3: torch.Tensor) -> torch.Tensor:
    """(U, P, 2) column and row of each patch, row by row; -1 where an image has fewer than the largest."""
    import torch

    counts = grids_U3.prod(1)
    place_P = torch.arange(int(counts.max()))
    columns_U1 = grids_U3[:, 2:]
    found = torch.stack([place_P % columns_U1, place_P // columns_U1], -1)
    return found.masked_fill((place_P >= counts[:, None])[..., None], -1)


def _batched(pixels: torch.Tensor, grids_U3: torch.Tensor) -> torch.Tensor:
    """(U, P, values) patches that were joined, with zeros where an image has fewer than the largest."""
    import torch

    return torch.nn.utils.rnn.pad_sequence(list(pixels.split(grids_U3.prod(1).tolist())), batch_first=True)
