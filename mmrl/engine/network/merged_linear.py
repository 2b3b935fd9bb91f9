"""Adapted layers that compute with the weight that the sampler gets.

``W + (alpha / rank) B A`` is rounded to the run's element type before it is sent, and W lies on that type's grid: in
bfloat16 a sum rounds back to W wherever the change is less than half a step of the grid. A learner that added
``x A^T B^T`` to ``x W^T`` would be another policy than its sampler until the adapters have grown. So in a type
narrower than float32 a layer multiplies with the rounded weight, and the gradient goes straight through the rounding
(a straight-through estimator: Bengio et al., 2013, arXiv:1308.3432, section 4)::

    V = round(W + s B A)      y = x V^T      dx = dy V      dB = s dy^T (x A^T)      dA = s (dy B)^T x

V is made by the same function as for the sampler, for each pass anew, and kept by nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mmrl.engine.device import MERGED_AT_ONCE
from mmrl.engine.network.quantization import whole

NAME = "default"
"""peft's name of a layer's only adapter."""


class Kept:
    """The share of the adapters' change that rounding has left, over all layers that were merged with it.

    With a layer's change D = s B A it is ``sum <round(W + D) - W, D> / sum <D, D>``: 1 if all of it arrives, 0 if
    nothing does. Rounding up counts for as much as it adds, so it may be slightly more than 1.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, weight: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Count some rows of a layer: (rows, in) ``W`` and ``W + D`` in float32, and the latter rounded."""
        change = (exact - weight).flatten()
        arrived = (rounded.float() - weight).flatten()
        sums = torch.stack([torch.dot(arrived, change), torch.dot(change, change)]).double()
        self._sums = sums if self._sums is None else self._sums + sums

    @property
    def share(self) -> float | None:
        """None if the adapters change nothing."""
        if self._sums is None:
            return None
        arrived, change = self._sums.tolist()
        return arrived / change if change > 0 else None


def merged(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    dtype: torch.dtype,
    kept: Kept | None = None,
) -> torch.Tensor:
    """(out, in) ``W + scaling * B A``: computed in float32, some rows at a time, and rounded once.

    A CPU would have to fetch and clear the memory of whole float32 copies page by page.

    Args:
        kept: Counts what the rounding leaves.
    """
    a, b = a.float(), b.float()
    rows = max(MERGED_AT_ONCE[weight.device.type] // weight.shape[1], 1)
    result = torch.empty_like(weight, dtype=dtype)
    for part, weight_part, b_part in zip(result.split(rows), weight.split(rows), b.split(rows), strict=True):
        wide = weight_part.float()
        exact = torch.addmm(wide, b_part, a, alpha=scaling)
        part.copy_(exact)
        if kept is not None:
            kept.add(wide, exact, part)
    return result


class MergedLinear(torch.nn.Module):
    """A linear layer with an adapter, in a type narrower than float32.

    It takes over the modules of peft's layer, so weights keep their names, and answers as that layer does where it is
    asked for its scaling or switched off.

    Args:
        layer: peft's layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer: torch.nn.Linear = layer.base_layer
        self.lora_A, self.lora_B = layer.lora_A, layer.lora_B
        self.scaling: dict[str, float] = layer.scaling
        self._is_adapted = True

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight; models look at its type and device."""
        return self.base_layer.weight

    def enable_adapters(self, enabled: bool) -> None:
        """Compute with the adapter, or without it."""
        self._is_adapted = enabled

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._is_adapted:
            plain: torch.Tensor = self.base_layer(input)
            return plain
        a, b = self.lora_A[NAME].weight, self.lora_B[NAME].weight
        base, scaling = self.base_layer, self.scaling[NAME]
        found: torch.Tensor = _Product.apply(input, base.weight, base.bias, a, b, base, scaling)  # type: ignore[no-untyped-call]
        return found


class _Product(torch.autograd.Function):
    """``F.linear`` of the rounded sum, whose gradient is that of the sum before it was rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        stored: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        base: torch.nn.Linear,
        scaling: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, stored, a, b)
        ctx.base, ctx.scaling = base, scaling
        return F.linear(input, merged(whole(base, stored), a, b, scaling, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        input, stored, a, b = ctx.saved_tensors
        scaling, of_input, of_a, of_b = ctx.scaling, None, None, None
        gradient = gradients[0].reshape(-1, b.shape[0])
        if ctx.needs_input_grad[0]:
            weight = merged(whole(ctx.base, stored), a, b, scaling, gradient.dtype)
            of_input = (gradient @ weight).view(input.shape)
        rows = input.reshape(-1, a.shape[1])
        # alpha is applied before the result is rounded, and beta = 0 leaves the first matrix out.
        if ctx.needs_input_grad[3]:
            of_a = torch.addmm(a, (gradient @ b).T, rows, beta=0, alpha=scaling)
        if ctx.needs_input_grad[4]:
            of_b = torch.addmm(b, gradient.T, rows @ a.T, beta=0, alpha=scaling)
        return of_input, None, None, of_a, of_b, None, None
