"""Causal attention over packed rows, registered with transformers under two names.

Letters: ``T`` packed tokens, ``H`` query heads, ``K`` key-value heads, ``D`` head size, ``N`` sequences of a length,
``L`` that length.

Both functions take the layout of the row as keyword argument ``layout`` of the model call, and no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mmrl.ops.packing import offsets


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each sequence lies in a packed row.

    Attributes:
        bounds: (num_sequences + 1,) int32 starts, and the row's end.
        max_length: Longest sequence.
        same_length: For each length, (N, L) int64 positions of the sequences that have it.
    """

    bounds: torch.Tensor
    max_length: int
    same_length: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: str) -> PackedLayout:
        bounds = torch.tensor(offsets(lengths), dtype=torch.int32)
        lengths_N = torch.tensor(lengths)
        same = [
            (bounds[:-1][lengths_N == length].long()[:, None] + torch.arange(int(length))).to(device)
            for length in lengths_N.unique()
        ]
        return cls(bounds.to(device), max(lengths), tuple(same))


def packed_sdpa(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, T, H, D): scaled dot-product attention, one batched call for all sequences of a length."""
    query_HTD, key_KTD, value_KTD = query_1HTD[0], key_1KTD[0], value_1KTD[0]
    order, outputs = [], []
    for index_NL in layout.same_length:
        q, k, v = (x[:, index_NL].transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
        out_NHLD = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=query_HTD.shape[0] != key_KTD.shape[0]
        )
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
        order.append(index_NL.flatten())
    out_THD = torch.cat(outputs)[torch.cat(order).argsort()]
    return out_THD[None], None


def packed_varlen(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, T, H, D): torch's variable-length attention (CUDA, half precision), one call for the whole row."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    out_THD = varlen_attn(
        q,
        k,
        v,
        layout.bounds,
        layout.bounds,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out_THD, torch.Tensor)
    return out_THD[None], None


def register() -> None:
    """Make both functions known to transformers; a mask is never built for them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in (("mmrl_packed_sdpa", packed_sdpa), ("mmrl_packed_varlen", packed_varlen)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
