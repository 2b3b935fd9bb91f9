"""Features of images, of which a vision tower that nothing trains makes each one once a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmrl.data.grid import ImageSizes
from mmrl.engine import device
from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.counting import UpdateCost
from mmrl.engine.machine.full_device import TokenBudget
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.image_form import Features
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.vision import BLANK
from mmrl.ops.packing import first_fit
from mmrl.types import Sample

PROBE = (64, 48)
"""Sides of the image by which the pixels that two models read are compared, before they are normalised."""


class ImageFeatures:
    """The features of images by their hashes; networks share them if their towers are equal, see ``tower_hash``.

    Args:
        policy: The network that has the tower.
        module: Called in its place, such as DeepSpeed's engine around it.
        cost: The cost of its rows.
        budget: Tokens of a batch of images, of all ranks that hold rows together: they divide a batch.
        keeps: False if the tower sees an image in every row.

    Attributes:
        kept: True if features are remembered: unless it is trained, a tower sees an image once a step.
        known: Those that are remembered now.
        where: The torch device that they are on.
    """

    def __init__(
        self,
        collator: Collator,
        policy: Policy,
        module: Any,
        cost: UpdateCost,
        folder: ModelFolder,
        budget: TokenBudget,
        where: torch.device,
        *,
        keeps: bool = True,
    ) -> None:
        self._collate, self._module, self._cost = collator, module, cost
        self._folder, self._budget, self.where = folder, budget, where
        self._width = policy.model.dtype.itemsize
        self.known: dict[str, Features] = {}
        self.kept = keeps and collator.share and folder.family.vision and not cost.trains_tower

    @torch.no_grad()
    def remember(self, samples: Sequence[Sample]) -> list[int]:
        """Compute the features of new images, if the vision tower is not trained; keep all, or none for lack of room.

        All ranks take as many rounds as the rank with most images needs.

        Returns:
            Operations of each round.
        """
        if not self.kept:
            return []
        refs = {ref.hash: ref for ref in (BLANK, *(ref for sample in samples for ref in sample.all_images))}
        new = [ref for name, ref in refs.items() if name not in self.known]
        sizes = [self._folder.image_tokens(ref.width, ref.height) for ref in new]
        batches = [[new[i] for i in part] for part in first_fit(sizes, self._budget.tokens)]
        known = sum(feature.nbytes for features in self.known.values() for feature in features)
        room = device.IMAGE_FEATURE_BYTES[self.where.type] - known
        is_too_much = sum(sizes) * self._cost.image_token_bytes(self._width) > room
        most = torch.tensor([len(batches), is_too_much], device=self.where)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if most[1]:
            self.known.clear()
            return []
        self._module.eval()
        self._collate.announce(batches)
        flops = []
        for number in range(int(most[0])):
            batch = batches[number] if number < len(batches) else [BLANK]
            images = self._collate.images(batch)
            flops.append(self._cost.tower_flops(images))
            self.known |= {ref.hash: found for ref, found in zip(batch, self._module(images), strict=True)}
        return flops

    def forget(self) -> None:
        """Drop the features, so that the next step is computed as in a fresh process."""
        self.known.clear()


def tower_hash(policy: Policy, folder: ModelFolder, sizes: ImageSizes) -> str:
    """A hash of all that decides a vision tower's features: its weights, the projector's, and the pixels that it reads.

    Only of a policy that has its weights in the host's memory; empty if it reads no images.

    Args:
        sizes: The sizes of stored images.
    """
    if not folder.family.vision:
        return ""
    found = hashlib.sha256(_probe(folder, sizes))
    named = [*policy.model.named_parameters(), *policy.model.named_buffers()]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if folder.family.part_of(name) in ("vision", "projector"):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _probe(folder: ModelFolder, sizes: ImageSizes) -> bytes:
    """The pixels of an image as the model's own processor gives them to its tower."""
    from PIL import Image as PILImage

    width, height = sizes.size(*PROBE)
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows % 256, columns % 256, (rows + columns) % 256], -1).astype(np.uint8)
    pixels, grid = folder.images.read(PILImage.fromarray(image))
    return pixels.float().contiguous().numpy().tobytes() + repr(grid.tolist()).encode()
