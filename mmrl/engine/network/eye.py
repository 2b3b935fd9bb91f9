"""Looks at what a model's vision tower is given and what it makes of it, in transformers' models and in vLLM's.

Both libraries call the parts of a model by the same names, and both build them of torch's modules, whose public hooks
see each call. So what is compared is not what a processor says, but what the tower has read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mmrl.engine.network.family import Family
from mmrl.engine.network.folder import ModelFolder
from mmrl.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Sight:
    """The records of an ``Eye``, which can travel."""

    pixels: Sequence[FloatArray]
    grids: Sequence[IntArray]
    num_features: Sequence[int]


@dataclass(eq=False)
class Eye:
    """Records the calls of a vision tower from ``open`` to ``close``.

    Attributes:
        pixels: (P, V) float32 patches that its first layer was given, of each call; where it takes a batch, each image
            or tile is a row, which may be padded.
        grids: (I, 3) frames, rows and columns of patches of each image, of each call; none where a model has no grids.
        num_features: Rows of features for the language model, of each call.
    """

    family: Family
    pixels: list[FloatArray] = field(default_factory=list)
    grids: list[IntArray] = field(default_factory=list)
    num_features: list[int] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    @property
    def sight(self) -> Sight:
        """Its records so far."""
        return Sight(self.pixels, self.grids, self.num_features)

    def open(self, model: torch.nn.Module) -> None:
        """Begin to look at a model."""
        tower, last = _module(model, self.family, "vision"), _module(model, self.family, "projector")
        self._handles = [
            _first_layer(tower).register_forward_pre_hook(self._see_pixels),
            tower.register_forward_pre_hook(self._see_grids, with_kwargs=True),
            (last or tower).register_forward_hook(self._see_features),
        ]

    def close(self, model: torch.nn.Module | None = None) -> None:
        """Look no longer; the records stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget_blanks(self, folder: ModelFolder) -> None:
        """Forget the blank image of each call, which a learner adds so that all ranks do the same."""
        form, (_, grid) = folder.images, folder.images.blank()
        count, tokens = form.seen(form.grid(0, 0))[0], folder.image_tokens(0, 0)
        for call, pixels in enumerate(self.pixels):
            empty = np.flatnonzero((pixels == form.blank_value).all(1))[:count]
            if len(empty) == count:
                self.pixels[call] = np.delete(pixels, empty, 0)
                self.num_features[call] -= tokens
                same = np.flatnonzero((self.grids[call] == grid.numpy()).all(1))[:1]
                self.grids[call] = np.delete(self.grids[call], same, 0)

    def _see_pixels(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        pixels = inputs[0].detach().float().cpu()
        self.pixels.append(pixels.reshape(len(pixels), -1).numpy())

    def _see_grids(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.grids.append(next(_grids([*inputs, *named.values()]), np.zeros((0, 3), np.int64)))

    def _see_features(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found = getattr(output, "pooler_output", output)
        features = found[0] if isinstance(found, tuple | list) else found
        self.num_features.append(features.numel() // features.shape[-1])


def _module(model: torch.nn.Module, family: Family, part: str) -> Any:
    """The part's outermost module; None for a projector that lies in the tower."""
    names = {prefix.rstrip(".").removeprefix("model.") for prefix in family.parts[part]}
    outer = {name for name in names if "." not in name}
    return next((each for name, each in model.named_modules() if name.rpartition(".")[2] in outer), None)


def _first_layer(tower: torch.nn.Module) -> torch.nn.Module:
    """The layer that reads the pixels: the first convolution, or the first linear layer."""
    return next(each for each in tower.modules() if re.search("Conv|Linear", type(each).__name__))


def _grids(values: list[Any]) -> Iterator[IntArray]:
    """The values that are grids: whole numbers in rows of three."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            continue
        try:
            found = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError):
            continue
        if found.ndim == 2 and found.shape[1] == 3 and found.dtype.kind in "iu":
            yield found.astype(np.int64)
