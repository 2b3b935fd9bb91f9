"""Micro-batches of a rank's samples, and the features of their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.counting import UnitCost, UpdateCost
from mmrl.engine.machine.full_device import TokenBudget
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.image_form import Features
from mmrl.engine.network.packed_inputs import PackedInputs
from mmrl.engine.network.vision import BLANK, idle_sample
from mmrl.ops.packing import Unit, first_fit, plan_microbatches
from mmrl.types import FloatArray, Sample, TrainingRow


class Microbatches:
    """Plans and packs micro-batches, of which all ranks have the same number.

    Networks share one if their vision towers are equal: unless it is trained, a tower sees an image once a step.

    Args:
        engine: Computes the features of images.
        cost: The cost of its rows.
        budget: Tokens of a micro-batch; kept as ``budget``.
        keeps_features: False if a tower sees an image in every row.
    """

    def __init__(
        self,
        collator: Collator,
        engine: Any,
        cost: UpdateCost,
        folder: ModelFolder,
        budget: TokenBudget,
        *,
        keeps_features: bool = True,
    ) -> None:
        self._collate, self._engine, self._cost, self._folder = collator, engine, cost, folder
        self.budget = budget
        self._idle = idle_sample(folder)
        self._image_features: dict[str, Features] = {}
        may_keep = keeps_features and collator.share and folder.family.vision
        self._keeps_image_features = may_keep and not cost.trains_tower
        self._estimate = UnitCost(folder, tower=not self._keeps_image_features)

    def plan(self, samples: Sequence[Sample], budget: int, rows: Sequence[TrainingRow] = ()) -> list[list[int]]:
        """This rank's micro-batches, empty ones at the end where other ranks have more.

        Args:
            rows: The samples', if they are trained on: their views are in their micro-batch too.
        """

        def cost(unit: Unit) -> float:
            return self._estimate(unit, samples)

        parts = plan_microbatches(self._collate.units(samples, budget, rows), budget, cost)
        plan = [[index for unit in part for index in unit.indices] for part in parts]
        if not self._image_features:
            views = [row.own_views for row in rows] or [[] for _ in samples]
            seen = [[sample, *map(sample.seen, own)] for sample, own in zip(samples, views, strict=True)]
            self._collate.announce(ref for part in plan for i in part for each in seen[i] for ref in each.all_images)
        most = torch.tensor(len(plan), device=self._collate.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return plan + [[] for _ in range(int(most) - len(plan))]

    def inputs(self, samples: Sequence[Sample]) -> PackedInputs:
        """The packed row of a micro-batch; an idle sample is at its end where it needs one, see ``idle_sample``."""
        reads = self._folder.family.vision and not self._image_features
        lacks = reads and not any(sample.all_images for sample in samples)
        idle = [self._idle] if lacks or not samples else []
        return self._collate([*samples, *idle], self._image_features)

    @torch.no_grad()
    def remember_images(self, samples: Sequence[Sample]) -> list[int]:
        """Compute the features of new images, if the vision tower is not trained; keep all, or none for lack of room.

        All ranks take as many rounds as the rank with most images needs.

        Returns:
            Operations of each round.
        """
        if not self._keeps_image_features:
            return []
        refs = {ref.hash: ref for ref in (BLANK, *(ref for sample in samples for ref in sample.all_images))}
        new = [ref for name, ref in refs.items() if name not in self._image_features]
        sizes = [self._folder.image_tokens(ref.width, ref.height) for ref in new]
        batches = [[new[i] for i in part] for part in first_fit(sizes, self.budget.tokens)]
        known = sum(feature.nbytes for features in self._image_features.values() for feature in features)
        room = device.IMAGE_FEATURE_BYTES[self._engine.device.type] - known
        is_too_much = sum(sizes) * self._cost.image_token_bytes(self._engine.module.model.dtype.itemsize) > room
        most = torch.tensor([len(batches), is_too_much], device=self._engine.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if most[1]:
            self._image_features.clear()
            return []
        self._engine.eval()
        self._collate.announce(ref for batch in batches for ref in batch)
        flops = []
        for number in range(int(most[0])):
            batch = batches[number] if number < len(batches) else [BLANK]
            images = self._collate.images(batch)
            flops.append(self._cost.tower_flops(images))
            self._image_features |= {ref.hash: found for ref, found in zip(batch, self._engine(images), strict=True)}
        return flops

    def forget_images(self) -> None:
        """Drop the features of images, so that the next step is computed as in a fresh process."""
        self._image_features.clear()


def values_of(values_T: torch.Tensor, parts: Sequence[TrainingRow] | Sequence[Sample]) -> list[FloatArray]:
    """A packed row's values as one array per sample; values of an idle sample at the end are dropped."""
    lengths = [len(part.mask) for part in parts]
    return list(np.split(values_T.float().cpu().numpy(), np.cumsum(lengths)))[: len(parts)]
