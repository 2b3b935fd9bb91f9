"""A wider type for the weights of a module while it computes, without a copy of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

CHUNK_NUMBERS = {"cpu": 2**18}
"""Numbers of a linear layer's weight that are widened at a time, by the device: what the cache of a core holds."""
LARGE_CHUNK = 2**26
"""As many on any other device, whose kernels are started one by one."""
TAKES_FEW = {functional.embedding, torch.Tensor.__getitem__, torch.Tensor.size}
"""Functions that leave numbers as they are and take few of them: what they give is widened."""


class Widening(TorchFunctionMode):
    """A context in which parameters of one type act as if they were of a wider one.

    Each function that gets such a parameter gets it widened, for the time of its call. The numbers are those of a
    module whose parameters were widened before; a linear layer with a large weight multiplies some of its rows after
    others, so its sums may be in another order. A module may ask for the type of its parameters and is told the wider
    one.

    Args:
        own: The type of the parameters.
        wider: The type that they act in; the inputs have it.
    """

    def __init__(self, own: torch.dtype, wider: torch.dtype) -> None:
        super().__init__()
        self._own, self._wider = own, wider
        self._room = torch.empty(0)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" or func in TAKES_FEW:
            asks = any(map(self._is_narrow, [*args, *named.values()]))
            found = func(*args, **named)
            return self._widened_result(found) if asks else found
        if func is functional.linear and self._is_narrow(args[1]):
            return self._linear(*args, **named)
        return func(*self._widened(args), **self._widened(named))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``functional.linear`` with some rows of the weight after others, in memory that is used again."""
        rows = max(CHUNK_NUMBERS.get(weight.device.type, LARGE_CHUNK) // weight.shape[1], 1)
        if len(self._room) < min(rows, len(weight)) * weight.shape[1] or self._room.device != weight.device:
            self._room = weight.new_empty(min(rows, len(weight)) * weight.shape[1], dtype=self._wider)
        if bias is not None:
            bias = bias.to(self._wider)
        parts = []
        for first in range(0, len(weight), rows):
            part = weight[first : first + rows]
            wide = self._room[: part.numel()].view_as(part).copy_(part)
            parts.append(functional.linear(input, wide, None if bias is None else bias[first : first + rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _is_narrow(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Parameter) and value.dtype == self._own

    def _widened(self, value: Any) -> Any:
        """Arguments with their parameters widened; in lists and dictionaries too."""
        if isinstance(value, dict):
            return {name: self._widened(each) for name, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self._widened, value))
        return value.to(self._wider) if self._is_narrow(value) else value

    def _widened_result(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return found.to(self._wider) if found.dtype == self._own else found
        return self._wider if found is self._own else found
