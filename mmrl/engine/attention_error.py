"""How far the attention kernel in use is from plain attention in float32, forward and backward.

Letters as in ``mmrl.engine.attention``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmrl.engine import attention, device

LENGTHS = (5, 64, 17, 1, 64, 130)
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest sound relative error: float32 sums in another order, and bfloat16 has 8 digits (2 ** -8 is 4e-3)."""


def attention_error(kind: device.DeviceKind, precision: str, *, heads: int = 4, key_heads: int = 2) -> float:
    """Largest relative error ``|a - b| / |b|`` of the output and of the gradients of query, key and value."""
    where, dtype = device.torch_device(kind), getattr(torch, precision)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), 32) for count in (heads, key_heads, key_heads)]
    inputs = [torch.randn(shape, generator=generator).to(where, dtype) for shape in shapes]
    upstream_1THD = torch.randn(1, sum(LENGTHS), heads, 32, generator=generator).to(where, dtype)
    kernels = {"mmrl_packed_sdpa": attention.packed_sdpa, "mmrl_packed_varlen": attention.packed_varlen}
    kernel = kernels[device.attention(kind, precision)]
    layout = attention.PackedLayout.of(LENGTHS, where)

    query, key, value = tested = [x.clone().requires_grad_() for x in inputs]
    output, _ = kernel(torch.nn.Module(), query, key, value, None, layout=layout, scaling=32**-0.5)
    exact = [x.double().requires_grad_() for x in inputs]
    expected = _plain(*exact)
    gradients = torch.autograd.grad(output, tested, upstream_1THD)
    exact_gradients = torch.autograd.grad(expected, exact, upstream_1THD.double())
    pairs = zip((output, *gradients), (expected, *exact_gradients), strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def _plain(query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor) -> torch.Tensor:
    """(1, T, H, D): one sequence at a time, by the formula."""
    repeats = query_1HTD.shape[1] // key_1KTD.shape[1]
    outputs = []
    parts = [x.split(LENGTHS, dim=2) for x in (query_1HTD, key_1KTD, value_1KTD)]
    for q, k, v in zip(*parts, strict=True):
        scores_HLL = q[0] @ k[0].repeat_interleave(repeats, 0).mT / q.shape[-1] ** 0.5
        future_LL = torch.ones_like(scores_HLL[0], dtype=torch.bool).triu(1)
        weights_HLL = F.softmax(scores_HLL.masked_fill(future_LL, float("-inf")), -1)
        outputs.append(weights_HLL @ v[0].repeat_interleave(repeats, 0))
    return torch.cat(outputs, 1).transpose(0, 1)[None]
