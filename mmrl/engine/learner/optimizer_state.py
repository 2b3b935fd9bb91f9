"""The state of DeepSpeed's optimizer, weight by weight: the elements that a rank holds, without gathering any.

A weight's elements are counted row by row, as in memory. A rank holds a range of them, and nothing of weights whose
range is empty: all of them without ZeRO, what its flat partition covers at stages 1 and 2, an even share at stage 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.engine.network.policy import Policy
from mmrl.engine.network.weights import numel, of_all_ranks

MASTER = "master"


@dataclass(frozen=True, slots=True)
class _Slice:
    """The part of a weight in a flat partition of stages 1 and 2.

    Attributes:
        group: Number of the optimizer's group.
        start: Its first element's place in the partition.
        held: Its elements.
    """

    group: int
    start: int
    held: range


class OptimizerState:
    """This rank's part of the state; ranks make one together, and read and set it each alone.

    DeepSpeed makes the state in its first step.
    """

    def __init__(self, engine: Any, policy: Policy) -> None:
        self._optimizer, self._stage = engine.optimizer, engine.zero_optimization_stage()
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.weights = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._has_masters = policy.model.dtype != torch.float32
        owned = [p for group in self._optimizer.param_groups for p in group["params"]] if self._stage == 0 else []
        self._owned = dict(zip(self.weights, owned, strict=True)) if self._stage == 0 else {}
        self._slices = self._find_slices(policy) if self._stage in (1, 2) else {}

    @property
    def adam_step(self) -> int:
        """Adam's own count of steps; 0 before there is a state."""
        counts = {int(state["step"]) for state in self._optimizer.state.values() if "step" in state}
        assert len(counts) <= 1, f"weights have taken different numbers of steps: {counts}"
        return counts.pop() if counts else 0

    @adam_step.setter
    def adam_step(self, steps: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)

    def kinds(self, adam_step: int) -> tuple[str, ...]:
        """Kinds of tensors that each weight has."""
        masters = (MASTER,) if self._has_masters else ()
        return (*masters, "exp_avg", "exp_avg_sq") if adam_step else masters

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the trained weights."""
        return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in self.weights.items()}

    def held(self, name: str) -> range:
        """The elements of a weight whose state this rank holds."""
        count = numel(self.weights[name])
        if self._stage == 0:
            return range(count)
        if self._stage < 3:
            return self._slices[name].held if name in self._slices else range(0)
        size = self.weights[name].ds_tensor.numel()  # the last ranks' shares are filled up
        return range(min(self._rank * size, count), min((self._rank + 1) * size, count))

    def own(self, name: str) -> range:
        """The elements that this rank saves: every element is one rank's own."""
        held = self.held(name)
        if self._stage:
            return held
        return held[len(held) * self._rank // self._ranks : len(held) * (self._rank + 1) // self._ranks]

    def get(self, name: str, kind: str, elements: range) -> torch.Tensor:
        """Values of some of the elements that are held."""
        import deepspeed.utils as public

        weight, start = self.weights[name], self.held(name).start
        if self._stage < 3:
            flat = self._flat(name, kind)
        elif kind == MASTER:
            flat = public.safe_get_local_fp32_param(weight)
        else:
            flat = public.safe_get_local_optimizer_state(weight, kind)
        return flat.detach()[elements.start - start : elements.stop - start]

    @torch.no_grad()
    def set(self, name: str, kind: str, pieces: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Take over all that is held of a weight.

        Args:
            pieces: Values, each with the number of its first element.
        """
        import deepspeed.utils as public

        weight, start = self.weights[name], self.held(name).start
        flat = self._flat(name, kind) if self._stage < 3 else torch.zeros_like(weight.ds_tensor, dtype=torch.float32)
        if self._stage == 0 and kind != MASTER:
            state = self._optimizer.state[self._owned[name]]
            state.setdefault("step", torch.zeros((), device=flat.device))  # where a fused step reads it
            state[kind] = flat.view_as(self._owned[name])
        for first, values in pieces:
            flat[first - start : first - start + len(values)].copy_(values)
        if self._stage == 3 and kind == MASTER:
            public.safe_set_local_fp32_param(weight, flat)
        elif self._stage == 3:
            public.safe_set_local_optimizer_state(weight, flat, kind)

    def _flat(self, name: str, kind: str) -> torch.Tensor:
        """The values that are held of a weight below stage 3: a view of them, or zeros where there are none."""
        if self._stage:
            place = self._slices[name]
            flat = self._optimizer.param_groups[place.group]["params"][0]
            whole: torch.Tensor = flat.detach() if kind == MASTER else self._optimizer.state[flat][kind]
            return whole.narrow(0, place.start, len(place.held))
        owned: torch.Tensor = self._owned[name]
        if kind == MASTER:
            return owned.detach().view(-1)
        # A weight that never had a gradient has no state.
        values: torch.Tensor | None = self._optimizer.state.get(owned, {}).get(kind)
        return torch.zeros_like(owned).view(-1) if values is None else values.view(-1)

    def _find_slices(self, policy: Policy) -> dict[str, _Slice]:
        """DeepSpeed tells where a weight's part lies in this rank's partition; lower ranks have what comes before."""
        names = {id(parameter): name for name, parameter in policy.named_parameters()}
        of_engine = {names[id(weight)]: name for name, weight in self.weights.items()}
        groups = self._optimizer.state_dict()["param_slice_mappings"]
        found = {
            of_engine[name]: (number, place.start, place.numel)
            for number, group in enumerate(groups)
            for name, place in group.items()
        }
        ranks = of_all_ranks({name: count for name, (_, _, count) in found.items()})
        slices = {}
        for name, (group, start, count) in found.items():
            before = sum(counts.get(name, 0) for counts in ranks[: self._rank])
            slices[name] = _Slice(group, start, range(before, before + count))
        return slices
