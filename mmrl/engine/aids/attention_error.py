"""The error of the attention kernels in use against plain attention, forward and backward.

Letters as in ``mmrl.engine.network.attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mmrl.engine import device
from mmrl.engine.network import attention
from mmrl.engine.network.layout import PackedLayout
from mmrl.ops.packing import Span, Unit

SPANS = [*Unit((), 64, (5, 17, 1, 64)).spans(0), Span(151, 130)]
"""A prompt with completions, and a sequence of its own."""
WINDOWS = [Span(0, 64), Span(64, 16), Span(80, 1), Span(81, 200)]
"""Images, or windows of them."""
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
    layout = PackedLayout(spans, device.torch_device(kind), getattr(torch, precision))
    kernel = partial(attention.KERNELS[device.attention(kind, precision)], layout=layout)
    counts = heads, key_heads, key_heads
    return _error(kernel, partial(_plain, spans, causal=True), kind, precision, counts, spans, head_size)


def tower_error(kind: device.DeviceKind, precision: str, *, heads: int = 4) -> float:
    """The same error for a vision tower's kernel, where ``device.tower_attention`` names one of ours."""
    ends = torch.tensor([0, *(span.start + span.length for span in WINDOWS)], dtype=torch.int32)
    ends, longest = ends.to(device.torch_device(kind)), max(span.length for span in WINDOWS)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    kernel = partial(attention.KERNELS[device.tower_attention(kind, precision)], **bounds)
    return _error(kernel, partial(_plain, WINDOWS, causal=False), kind, precision, (heads,) * 3, WINDOWS, 80)


def _error(
    kernel: Callable[..., Any],
    plain: Callable[..., torch.Tensor],
    kind: device.DeviceKind,
    precision: str,
    heads: Sequence[int],
    spans: Sequence[Span],
    size: int,
) -> float:
    where, dtype = device.torch_device(kind), getattr(torch, precision)
    tokens = sum(span.length for span in spans)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, count, tokens, size), generator=generator).to(where, dtype) for count in heads]
    upstream_1SHD = torch.randn(1, tokens, heads[0], size, generator=generator).to(where, dtype)

    query, key, value = tested = [x.clone().requires_grad_() for x in inputs]
    output, _ = kernel(torch.nn.Module(), query, key, value, None, scaling=size**-0.5)
    exact = [x.double().requires_grad_() for x in inputs]
    expected = plain(*exact)
    gradients = torch.autograd.grad(output, tested, upstream_1SHD)
    exact_gradients = torch.autograd.grad(expected, exact, upstream_1SHD.double())
    pairs = zip((output, *gradients), (expected, *exact_gradients), strict=True)
    return max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def _plain(
    spans: Sequence[Span],
    query_1HSD: torch.Tensor,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
    *,
    causal: bool,
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
        if causal:
            future_LM = torch.ones_like(scores_HLM[0], dtype=torch.bool).triu(1 + span.prefix_length)
            scores_HLM = scores_HLM.masked_fill(future_LM, float("-inf"))
        outputs.append(F.softmax(scores_HLM, -1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)[None]
