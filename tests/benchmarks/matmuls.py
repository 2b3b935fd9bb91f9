"""The matrix products of a block of code, counted, and how fast this machine does each of them alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
"""Where each operator's two factors are."""


class Matmuls(TorchDispatchMode):
    """Records products by shape, and the operations of attention (two for each multiplication with its addition).

    Attributes:
        products: Calls by (batch, rows, inner, columns).
        attention_flops: Of scaled dot-product attention, forward and backward; half of a causal square.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[tuple[int, int, int, int]] = Counter()
        self.attention_flops = 0.0

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def flops(self) -> float:
        """Of the products."""
        return sum(2.0 * math.prod(shape) * calls for shape, calls in self.products.items())

    def seconds_alone(self, repeats: int = 5) -> float:
        """Seconds that the same products take one after the other, each the fastest of some tries."""
        return sum(calls * _fastest(shape, repeats) for shape, calls in self.products.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            a, b = (args[i] for i in PRODUCTS[name])
            batch = a.shape[0] if a.dim() == 3 else 1
            self.products[batch, a.shape[-2], a.shape[-1], b.shape[-1]] += 1
        elif name.startswith("_scaled_dot_product"):
            self.attention_flops += _attention(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _attention(name: str, args: Any, kwargs: Any) -> float:
    """Two products forward, five backward."""
    backward = name.endswith("backward")
    q, k = (args[1], args[2]) if backward else (args[0], args[1])
    pairs = float(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
    causal = kwargs.get("is_causal") or any(value is True for value in args)
    return float((5 if backward else 2) * 2 * pairs * q.shape[3] * (0.5 if causal else 1))


def _fastest(shape: tuple[int, int, int, int], repeats: int) -> float:
    batch, rows, inner, columns = shape
    a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    if batch == 1:
        a, b = a[0], b[0]
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return best
