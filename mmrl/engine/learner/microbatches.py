"""Micro-batches of a rank's samples, and the features of their images."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.counting import UnitCost
from mmrl.engine.learner.image_features import ImageFeatures
from mmrl.engine.machine.full_device import TokenBudget
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.packed_inputs import PackedInputs
from mmrl.engine.network.vision import idle_sample
from mmrl.ops.packing import Unit, plan_microbatches
from mmrl.types import FloatArray, Sample, TrainingRow


class Microbatches:
    """Plans and packs a network's micro-batches, of which all ranks have the same number.

    Args:
        features: The images' features, which networks with equal towers share; kept as ``features``.
        budget: Tokens of a micro-batch; kept as ``budget``.

    Attributes:
        group: The ranks that hold a row together, and get the same samples.
    """

    def __init__(self, collator: Collator, features: ImageFeatures, folder: ModelFolder, budget: TokenBudget) -> None:
        self._collate, self.features, self._folder = collator, features, folder
        self.budget = budget
        self.group = collator.group
        self._idle = idle_sample(folder, self.group.size)
        self._estimate = UnitCost(folder, tower=not features.kept)

    def keeping_last(self) -> Microbatches:
        """The same of rows that have the last token of each sample, too."""
        found = copy.copy(self)
        found._collate = self._collate.keeping_last()
        return found

    def plan(self, samples: Sequence[Sample], budget: int, rows: Sequence[TrainingRow] = ()) -> list[list[int]]:
        """This rank's micro-batches, empty ones at the end where other ranks have more.

        Args:
            rows: The samples', if they are trained on: their views are in their micro-batch too.
        """

        def cost(unit: Unit) -> float:
            return self._estimate(unit, samples)

        parts = plan_microbatches(self._collate.units(samples, budget, rows), budget, cost)
        plan = [[index for unit in part for index in unit.indices] for part in parts]
        if not self.features.known:
            views = [row.own_views for row in rows] or [[] for _ in samples]
            seen = [[sample, *map(sample.seen, own)] for sample, own in zip(samples, views, strict=True)]
            self._collate.announce([ref for i in part for each in seen[i] for ref in each.all_images] for part in plan)
        most = torch.tensor(len(plan), device=self.features.where)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return plan + [[] for _ in range(int(most) - len(plan))]

    def inputs(self, samples: Sequence[Sample]) -> PackedInputs:
        """The packed row of a micro-batch; an idle sample is at its end where it needs one, see ``idle_sample``."""
        reads = self._folder.family.vision and not self.features.known
        lacks = reads and not any(sample.all_images for sample in samples)
        idle = [self._idle] if lacks or not samples or self._is_short(samples) else []
        return self._collate([*samples, *idle], self.features.known)

    def _is_short(self, samples: Sequence[Sample]) -> bool:
        """True if a row of these samples has no token for some rank of the group."""
        size = self.group.size
        return size > 1 and sum(unit.tokens for unit in self._collate.units(samples)) < size

    def remember_images(self, samples: Sequence[Sample]) -> list[int]:
        """As ``ImageFeatures.remember``."""
        return self.features.remember(samples)

    def forget_images(self) -> None:
        """As ``ImageFeatures.forget``."""
        self.features.forget()


def values_of(values_T: torch.Tensor, parts: Sequence[TrainingRow] | Sequence[Sample]) -> list[FloatArray]:
    """A packed row's values as one array per sample; values of an idle sample at the end are dropped."""
    lengths = [len(part.mask) for part in parts]
    return list(np.split(values_T.float().cpu().numpy(), np.cumsum(lengths)))[: len(parts)]
