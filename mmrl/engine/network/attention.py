"""Attention functions that are registered with transformers: two over packed rows whose spans may share a prefix, and
one over the images or windows of a vision tower.

Letters: ``S`` tokens or patches, ``H`` query heads, ``K`` key-value heads, ``D`` head size; and those of ``layout``.

The functions over rows take the row's layout as keyword argument ``layout`` of the model call. None takes a mask. Where
several ranks hold a row together, each of them computes some heads, see ``over_heads``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F

from mmrl.engine.device import repeats_heads, varlen_computes
from mmrl.engine.network.layout import PackedLayout, rows_at
from mmrl.ops.sequence import repeats_of


def packed_sdpa(
    module: torch.nn.Module,
    query_1HSD: torch.Tensor,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, S, H, D): scaled dot-product attention, one batched call for all chunks of spans of about one size."""
    row = layout.windowed(sliding_window)
    queries = [N * L for N, L, _ in (block.shape for block in row.blocks)]
    keys = [N * M for N, _, M in (block.shape for block in row.blocks)]
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HSD, key_1KSD, value_1KSD))
    parts = (
        rows_at(query, row.queries).split(queries),
        rows_at(key, row.keys).split(keys),
        rows_at(value, row.keys).split(keys),
    )
    outputs = []
    for block, *rows in zip(row.blocks, *parts, strict=True):
        q, k, v = (x.unflatten(0, (block.shape[0], -1)).transpose(1, 2) for x in rows)
        masked = block.bias_N1LM is not None
        if q.shape[1] != k.shape[1] and repeats_heads(str(q.device), q.dtype, q.shape[-1], masked=masked):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out_NHLD = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.bias_N1LM,
            is_causal=block.bias_N1LM is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    return rows_at(torch.cat(outputs), row.place_S)[None], None


def packed_varlen(
    module: torch.nn.Module,
    query_1HSD: torch.Tensor,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, S, H, D): torch's variable-length attention (CUDA, half precision), one call for the whole row.

    Layers that its kernel cannot compute go to ``packed_sdpa``.
    """
    looks_ahead = sliding_window is not None and layout.looks_ahead
    if not varlen_computes(query_1HSD.shape[-1], looks_ahead=looks_ahead):
        heads = query_1HSD, key_1KSD, value_1KSD
        return packed_sdpa(
            module, *heads, attention_mask, layout=layout, scaling=scaling, sliding_window=sliding_window
        )
    row = layout.bounds
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HSD, key_1KSD, value_1KSD))
    if row.key_order is not None:
        k, v = rows_at(k, row.key_order), rows_at(v, row.key_order)
    # Causal, aligned at the last query and the last key, so that a window goes back into the prefix.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    return _varlen(q, k, v, row.queries, row.keys, *row.longest, scale=scaling, window_size=window)[None], None


def tower_varlen(
    module: torch.nn.Module,
    query_1HSD: torch.Tensor,
    key_1HSD: torch.Tensor,
    value_1HSD: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, S, H, D): the same kernel, not causal: one call for all images, or for all their windows."""
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HSD, key_1HSD, value_1HSD))
    bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    return _varlen(q, k, v, *bounds, scale=scaling, window_size=(-1, -1))[None], None


def _varlen(
    query_SHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, *bounds: Any, **options: Any
) -> torch.Tensor:
    """(S, H, D): ``varlen_attn``, with fewer heads of keys and values if there are."""
    from torch.nn.attention.varlen import varlen_attn

    repeats = query_SHD.shape[1] // key_SKD.shape[1]
    if repeats > 1 and _takes(varlen_attn, "enable_gqa"):
        options["enable_gqa"] = True
    elif repeats > 1:  # torch 2.11
        key_SKD, value_SKD = (x.repeat_interleave(repeats, 1) for x in (key_SKD, value_SKD))
    out_SHD = varlen_attn(query_SHD, key_SKD, value_SKD, *bounds, **options)
    assert isinstance(out_SHD, torch.Tensor)
    return out_SHD


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function has a parameter of that name."""
    return name in inspect.signature(function).parameters


Kernel = Callable[..., tuple[torch.Tensor, None]]


def over_heads(kernel: Kernel) -> Kernel:
    """A kernel over packed rows that computes this rank's heads of all tokens, and answers all heads of its own tokens.

    Heads of keys and values are repeated if they are fewer than the ranks: each rank needs those of its queries.
    """

    @wraps(kernel)
    def divided(
        module: torch.nn.Module,
        query_1HOD: torch.Tensor,
        key_1KOD: torch.Tensor,
        value_1KOD: torch.Tensor,
        attention_mask: None,
        *,
        layout: PackedLayout,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        group = layout.group
        if group.size == 1:
            return kernel(module, query_1HOD, key_1KOD, value_1KOD, attention_mask, layout=layout, **options)
        repeats = repeats_of(key_1KOD.shape[1], group.size)
        heads = [query_1HOD[0], *(x[0].repeat_interleave(repeats, 0) for x in (key_1KOD, value_1KOD))]
        parts = [x.unflatten(0, (group.size, -1)).transpose(1, 2).flatten(2) for x in heads]
        own_SF = group.to_parts(torch.cat(parts, -1), layout.tokens).split([x.shape[-1] for x in parts], -1)
        own = [
            x_SF.unflatten(1, (-1, x.shape[-1])).transpose(0, 1)[None] for x_SF, x in zip(own_SF, heads, strict=True)
        ]
        out_1SHD, _ = kernel(module, *own, attention_mask, layout=layout, **options)
        out_ROF = group.to_tokens(out_1SHD[0].flatten(1))
        return out_ROF.transpose(0, 1).reshape(1, out_ROF.shape[1], query_1HOD.shape[1], -1), None

    return divided


KERNELS: dict[str, Kernel] = {
    "mmrl_packed_sdpa": over_heads(packed_sdpa),
    "mmrl_packed_varlen": over_heads(packed_varlen),
    "mmrl_flash_tower": tower_varlen,
}
"""The functions by the names that ``device`` chooses from.

In a vision tower, transformers gives the bounds of images and windows to a function whose name has ``flash`` in it. It
calls any other function for one image or window after the other.
"""


def register() -> None:
    """Make the functions known to transformers; a mask is never built for them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in KERNELS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
