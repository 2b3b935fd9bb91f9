"""One network of a learner that nothing trains: a model in a role, wherever its weights are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmrl.engine.learner.microbatches import Microbatches, values_of
from mmrl.engine.network.packed_inputs import OWN, PackedInputs
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.sequence import SequenceGroup
from mmrl.engine_api import Network as AnyNetwork
from mmrl.engine_api import UpdateResult, Way
from mmrl.types import FloatArray, Sample, TrainingRow


class Network(AnyNetwork):
    """Implements ``engine_api.Network`` on one rank, for this rank's share of the samples; all ranks call it together.

    Args:
        role: Kept as ``role``.
        policy: The weights, wherever they are; kept as ``policy``.
        module: Called in their place, such as DeepSpeed's engine around them.
        in_use: Entered while they compute.

    Attributes:
        scored: The noun for what ``score`` answers.
    """

    scored = "log-probs"

    def __init__(
        self,
        role: str,
        policy: Policy,
        module: Any,
        batches: Microbatches,
        *,
        in_use: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.policy, self._module, self._batches = policy, module, batches
        self._ending = batches.keeping_last()
        self.role, self._in_use = role, in_use

    @property
    def group(self) -> SequenceGroup:
        """As ``Microbatches.group``."""
        return self._batches.group

    def forget_images(self) -> None:
        """As ``Microbatches.forget_images``."""
        self._batches.forget_images()

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        """As ``engine_api.Network.score``; only a network that the sampler has goes the ``wide`` way."""
        if way == "wide":
            return []
        budget, packs = self._batches.budget, way == "packed"

        def run() -> list[FloatArray]:
            with self._in_use():
                return self._values(samples, budget.tokens if packs else 0)

        phase = f"{self.role} {self.scored}".removeprefix("policy ")
        return budget.within(phase, samples if packs else (), run, self._batches.forget_images)

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        """As ``engine_api.Network.final_values``."""
        assert self.policy.scored_by, f"the {self.role} has no score head"
        budget = self._batches.budget

        def run() -> FloatArray:
            with self._in_use():
                return self._final_values(samples, budget.tokens)

        return budget.within(f"{self.role} scores", samples, run, self._batches.forget_images)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        raise AssertionError(f"the {self.role} is frozen")

    def _inputs(self, samples: Sequence[Sample], batches: Microbatches | None = None) -> PackedInputs:
        """The packed row of a micro-batch; the experts that rollouts know are the sampler's, not this network's.

        Args:
            batches: Those to pack with, if it is not the network's own.
        """
        return replace((batches or self._batches).inputs(samples), routing=OWN)

    @torch.no_grad()
    def _values(self, samples: Sequence[Sample], budget: int) -> list[FloatArray]:
        self._module.eval()
        self._batches.remember_images(samples)
        found: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
        for indices in self._batches.plan(samples, budget):
            part = [samples[i] for i in indices]
            values_T, *_ = tensors(self._module(self._inputs(part)))
            for i, values in zip(indices, values_of(values_T, part), strict=True):
                found[i] = values
        return found

    @torch.no_grad()
    def _final_values(self, samples: Sequence[Sample], budget: int) -> FloatArray:
        self._module.eval()
        self._batches.remember_images(samples)
        values = np.zeros(len(samples), np.float32)
        for indices in self._ending.plan(samples, budget):
            values_N = self._module(self._inputs([samples[i] for i in indices], self._ending))
            values[indices] = values_N[: len(indices)].float().cpu().numpy()
        return values


def tensors(found: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors that a network answers, one or several."""
    return (found,) if isinstance(found, torch.Tensor) else found
