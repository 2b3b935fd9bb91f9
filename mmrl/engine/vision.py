"""The vision tower's inputs, computed once per image and kept within a memory bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from mmrl.data.images import MediaStore
from mmrl.engine import device
from mmrl.engine.folder import ModelFolder
from mmrl.types import EncodedPrompt, ImageRef, Prompt, Sample, Segment

CACHE_BYTES = 512 * 2**20
BLANK = ImageRef(hash="blank", width=0, height=0, path="")
"""The smallest image, one merged patch; no store has it."""


def idle_sample(folder: ModelFolder) -> Sample:
    """The smallest sample, with an image if the model reads any; it is trained on with weight 0.

    Rows without an image, and empty rows, get it. Ranks wait for each other in every module of the model, in the order
    in which modules run, and DeepSpeed's ZeRO 3 keeps the last gradient of a parameter that gets none.
    """
    end = np.array(folder.vocabulary.eos[:1], np.int32)  # a banned token would have an infinite log-prob
    token_ids, images = (np.array([folder.image_token_id], np.int32), (BLANK,)) if folder.family.vision else (end, ())
    prompt = EncodedPrompt(prompt=Prompt("", ()), text="", token_ids=token_ids, images=images)
    return Sample(prompt, (Segment(end, False, np.zeros(1, np.float32)),))


class ImageInputs:
    """Turns stored images into patches (P, C) and a grid (3,) of temporal, vertical and horizontal patches."""

    def __init__(self, folder: ModelFolder, media: MediaStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._processor = folder.processor.image_processor if folder.family.vision else None
        self._blank = _blank(folder) if folder.family.vision else None
        self._media = media
        self._cache: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0

    def __call__(self, ref: ImageRef) -> tuple[torch.Tensor, torch.Tensor]:
        if ref is BLANK:
            assert self._blank is not None
            return self._blank
        if ref.hash in self._cache:
            self._cache.move_to_end(ref.hash)
            return self._cache[ref.hash]
        assert self._processor is not None
        # The store's pixels are on the model's grid already: a second resize would only change them.
        inputs = self._processor(images=[self._media.load(ref)], do_resize=False, return_tensors="pt")
        entry = (inputs["pixel_values"], inputs["image_grid_thw"][0])
        self._cache[ref.hash] = entry
        self._used_bytes += entry[0].nbytes
        while self._used_bytes > self._cache_bytes and len(self._cache) > 1:
            _, (evicted, _) = self._cache.popitem(last=False)
            self._used_bytes -= evicted.nbytes
        return entry


def tower_inputs(tower: Any, grids_U3: torch.Tensor, where: str, dtype: torch.dtype) -> dict[str, torch.Tensor | int]:
    """Keyword arguments of a vision tower that it would otherwise compute from the grids.

    It would read the grids as plain numbers, and on a GPU the host would wait for all work under way. So the grids stay
    in the host's memory, and so do the bounds of attention where the tower reads those (``device.tower_bounds``).

    Args:
        tower: A tower of transformers.
        grids_U3: Grids in the host's memory.
        where: The torch device of the tower.
        dtype: The tower's element type.
    """
    from transformers import vision_utils as grids

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


def _blank(folder: ModelFolder) -> tuple[torch.Tensor, torch.Tensor]:
    vision = folder.config.vision_config
    side = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side * side, values), torch.tensor([1, side, side])
