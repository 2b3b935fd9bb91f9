"""Costs of a learner's passes: operations, counted from the packed rows themselves, and temporary memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.packed_inputs import PackedInputs, UniqueImages
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.weights import numel
from mmrl.ops.cost import PARTS, Training
from mmrl.ops.packing import Unit
from mmrl.types import Sample


class UpdateCost:
    """Operations that forward and backward of a packed row need; see ``ops.cost``.

    Args:
        config: The model's transformers config.
        training: The parts that are trained.
        scores: True if a score takes the place of the head; its product is nothing.

    Attributes:
        shape: The model's shape.
    """

    def __init__(self, config: Any, training: Training, *, scores: bool = False) -> None:
        self.shape, self._training, self._scores = model_shape(config), training, scores

    @classmethod
    def of(cls, policy: Policy, folder: ModelFolder) -> UpdateCost:
        """The cost of a policy's rows."""
        trained = dict.fromkeys(folder.family.parts, 0)
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                trained[folder.family.part_of(name)] += numel(parameter)
        return cls(folder.config, training_of(trained, adapted=bool(policy.adapted)), scores=bool(policy.scored_by))

    def flops(self, inputs: PackedInputs) -> int:
        """Operations of one row, of all ranks that hold it; a shared prompt or image counts once."""
        work = self.shape.work(
            tokens=int(inputs.model_inputs["input_ids"].shape[-1]),
            pairs=inputs.model_inputs["layout"].pairs,
            local_pairs=inputs.model_inputs["layout"].pairs_within,
            predicted=0 if self._scores else inputs.num_written,
            images=inputs.images.all_grids_U3.tolist() if isinstance(inputs.images, UniqueImages) else (),
        )
        return self.shape.update_flops(work, self._training)

    def tower_flops(self, images: UniqueImages) -> int:
        """Operations of the vision tower's forward pass."""
        return self.shape.forward_flops(
            self.shape.work(tokens=0, pairs=0, predicted=0, images=images.all_grids_U3.tolist())
        )

    def image_token_bytes(self, width: int) -> int:
        """Bytes of one image token's features, with ``width`` bytes a number."""
        tower = self.shape.tower
        return tower.mergers * tower.out * width if tower is not None else 0

    @property
    def trains_tower(self) -> bool:
        """True if a gradient goes into the vision tower or its merger."""
        return self.shape.tower is not None and self._training.reaches("projector")


class UnitCost:
    """Estimated operations of the samples of a prompt that lie together in a row. Ranks and rows are balanced by them.

    Only the forward pass counts: the backward pass adds nearly the same factor to all of them.

    Args:
        tower: True if their images go through the vision tower with them.
    """

    def __init__(self, folder: ModelFolder, *, tower: bool = True) -> None:
        self._tower = tower
        self._shape = model_shape(folder.config)
        self._form = folder.images if folder.family.vision else None

    def __call__(self, unit: Unit, samples: Sequence[Sample]) -> float:
        """The cost of a unit of these samples."""
        own = [samples[index] for index in unit.indices]
        refs = {ref.hash: ref for sample in own for ref in sample.all_images} if self._tower else {}
        work = self._shape.work(
            tokens=unit.tokens,
            pairs=unit.pairs,
            local_pairs=unit.pairs_within,
            predicted=unit.forms * sum(int(np.count_nonzero(sample.mask)) for sample in own),
            images=unit.forms * [self._form.grid(ref.width, ref.height) for ref in refs.values() if self._form],
        )
        return self._shape.forward_flops(work)


def training_of(trained: Mapping[str, int], *, adapted: bool) -> Training:
    """The training that a number of trained parameters of each part means; ``adapted``: they belong to adapters."""
    if adapted:
        return Training(adapters={part: size for part, size in trained.items() if size})
    return Training(frozen=frozenset(PARTS) - {part for part, size in trained.items() if size})


class UpdateMemory:
    """Peak memory of updates on a GPU.

    On a CPU nothing is measured: freed memory stays resident for a while, and would hide the memory of the next
    update.

    Attributes:
        above: Most bytes allocated in the last block, above those allocated before it; None on a CPU.
    """

    def __init__(self, kind: str) -> None:
        self._measures = kind == "cuda"
        self.above = cast(int | None, None)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a block."""
        if not self._measures:
            yield
            return
        import torch

        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            self.above = torch.cuda.max_memory_allocated() - before
