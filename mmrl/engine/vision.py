"""What the vision tower takes of an image, computed once per image and kept within a memory bound."""

from __future__ import annotations

from collections import OrderedDict

import torch

from mmrl.engine.folder import ModelFolder
from mmrl.media import MediaStore
from mmrl.types import ImageRef

CACHE_BYTES = 512 * 2**20


class ImageInputs:
    """Turns stored images into patches (P, C) and a grid (3,) of temporal, vertical and horizontal patches."""

    def __init__(self, folder: ModelFolder, media: MediaStore, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._processor = folder.processor.image_processor if folder.family.vision else None
        self._media = media
        self._cache: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0

    def __call__(self, ref: ImageRef) -> tuple[torch.Tensor, torch.Tensor]:
        if ref.hash in self._cache:
            self._cache.move_to_end(ref.hash)
            return self._cache[ref.hash]
        assert self._processor is not None
        # The store's pixels are on the model's grid already: a second resize could only make them differ.
        inputs = self._processor(images=[self._media.load(ref)], do_resize=False, return_tensors="pt")
        entry = (inputs["pixel_values"], inputs["image_grid_thw"][0])
        self._cache[ref.hash] = entry
        self._used_bytes += entry[0].nbytes
        while self._used_bytes > self._cache_bytes and len(self._cache) > 1:
            _, (evicted, _) = self._cache.popitem(last=False)
            self._used_bytes -= evicted.nbytes
        return entry
