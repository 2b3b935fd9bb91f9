"""The vision tower's inputs, computed once per image and kept within a memory bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch

from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.system.read_ahead import ReadAhead
from mmrl.types import EncodedPrompt, ImageRef, Prompt, Sample, Segment

CACHE_BYTES = 512 * 2**20
BLANK = ImageRef(hash="blank", width=0, height=0, path="")
"""The smallest image; no store has it."""


def idle_sample(folder: ModelFolder, tokens: int = 1) -> Sample:
    """The smallest sample, with an image if the model reads any; it is trained on with weight 0.

    Rows without an image, and empty rows, get it. Ranks wait for each other in every module of the model, in the order
    in which modules run, and DeepSpeed's ZeRO 3 keeps the last gradient of a parameter that gets none.

    Args:
        tokens: Least tokens of its prompt: each rank that holds the row gets one.
    """
    end = np.array(folder.vocabulary.eos[:1], np.int32)  # a banned token would have an infinite log-prob
    token_ids, images = end, tuple[ImageRef, ...]()
    if folder.family.vision:
        token_ids, images = np.array(folder.images.expansion(BLANK.width, BLANK.height), np.int32), (BLANK,)
    token_ids = np.concatenate([token_ids, np.repeat(end, max(tokens - len(token_ids), 0))])
    prompt = EncodedPrompt(prompt=Prompt("", ()), text="", token_ids=token_ids, images=images)
    return Sample(prompt, (Segment(end, True, np.zeros(1, np.float32)),))


class ImageInputs:
    """Turns stored images into pixels and a grid (3,) of frames, rows and columns of patches.

    Args:
        threads: Threads that read announced images ahead.
    """

    def __init__(
        self, folder: ModelFolder, media: MediaStore, *, cache_bytes: int = CACHE_BYTES, threads: int = 0
    ) -> None:
        self._form = folder.images if folder.family.vision else None
        self._blank = self._form.blank() if self._form is not None else None
        self._media = media
        self._ahead = ReadAhead(self._read, threads)
        self._cache: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0

    def __call__(self, ref: ImageRef) -> tuple[torch.Tensor, torch.Tensor]:
        if ref is BLANK:
            assert self._blank is not None
            return self._blank
        if ref.hash in self._cache:
            self._cache.move_to_end(ref.hash)
            return self._cache[ref.hash]
        entry = self._ahead(ref)
        self._cache[ref.hash] = entry
        self._used_bytes += entry[0].nbytes
        while self._used_bytes > self._cache_bytes and len(self._cache) > 1:
            _, (evicted, _) = self._cache.popitem(last=False)
            self._used_bytes -= evicted.nbytes
        return entry

    def announce(self, refs: Iterable[ImageRef]) -> None:
        """Tell which images come next, in order, in place of those that were told before."""
        self._ahead.forget()
        self._ahead.announce(ref for ref in refs if ref is not BLANK and ref.hash not in self._cache)

    def _read(self, ref: ImageRef) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._form is not None
        return self._form.read(self._media.load(ref))
