"""How far the attention kernel in use is from plain attention in float32, forward and backward.

Letters as in ``mmrl.engine.attention``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mmrl.engine import attention, device
from mmrl.ops.packing import Span, Unit

SPANS = [*Unit((), 64, (5, 17, 1, 64)).spans(0), Span(151, 130)]
"""A prompt with completions, and a sequence of its own."""
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest sound relative error: float32 sums in another order, and bfloat16 has 8 digits (2 ** -8 is 4e-3)."""


def attention_error(
    kind: device.DeviceKind,
    precision: str,
    *,
    heads: int = 4,
    key_heads: int = 2,
    head_size: int = 32,
    spans: Sequence[Span] = SPANS,
) -> float:
    """Largest relative error ``|a - b| / |b|`` of the output and of the gradients of query, key and value."""
    where, dtype = device.torch_device(kind), getattr(torch, precision)
    tokens = sum(span.length for span in spans)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, tokens, head_size) for count in (heads, key_heads, key_heads)]
    inputs = [torch.randn(shape, generator=generator).to(where, dtype) for shape in shapes]
    upstream_1SHD = torch.randn(1, tokens, heads, head_size, generator=generator).to(where, dtype)
    kernels = {"mmrl_packed_sdpa": attention.packed_sdpa, "mmrl_packed_varlen": attention.packed_varlen}
    kernel = kernels[device.attention(kind, precision)]
    layout = attention.PackedLayout(spans, where, dtype)

    query, key, value = tested = [x.clone().requires_grad_() for x in inputs]
    output, _ = kernel(torch.nn.Module(), query, key, value, None, layout=layout, scaling=head_size**-0.5)
    exact = [x.double().requires_grad_() for x in inputs]
    expected = _plain(spans, *exact)
    gradients = torch.autograd.grad(output, tested, upstream_1SHD)
    exact_gradients = torch.autograd.grad(expected, exact, upstream_1SHD.double())
    pairs = zip((output, *gradients), (expected, *exact_gradients), strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def _plain(
    spans: Sequence[Span], query_1HSD: torch.Tensor, key_1KSD: torch.Tensor, value_1KSD: torch.Tensor
) -> torch.Tensor:
    """(1, S, H, D): one span at a time, by the formula."""
    repeats = query_1HSD.shape[1] // key_1KSD.shape[1]
    outputs = []
    for span in spans:
        own, prefix = (
            slice(start, start + length)
            for start, length in ((span.start, span.length), (span.prefix_start, span.prefix_length))
        )
        q = query_1HSD[0, :, own]
        k, v = (
            torch.cat([x[0, :, prefix], x[0, :, own]], 1).repeat_interleave(repeats, 0) for x in (key_1KSD, value_1KSD)
        )
        scores_HLM = q @ k.mT / q.shape[-1] ** 0.5
        future_LM = torch.ones_like(scores_HLM[0], dtype=torch.bool).triu(1 + span.prefix_length)
        outputs.append(F.softmax(scores_HLM.masked_fill(future_LM, float("-inf")), -1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)[None]
