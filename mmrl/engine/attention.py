"""Attention functions that are registered with transformers: two over packed rows whose spans may share a prefix, and
one over the images or windows of a vision tower.

Letters: ``S`` tokens or patches, ``H`` query heads, ``K`` key-value heads, ``D`` head size; in a block: ``N`` entries,
``L`` queries and ``M`` keys of each.

The functions over rows take the row's layout as keyword argument ``layout`` of the model call. None takes a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmrl.engine import device
from mmrl.ops.packing import Span, offsets
from mmrl.types import IntArray

MASKED = 2
"""A call may compute at most this many times the pairs of query and key that are needed. Beyond it, more calls with
fewer masked pairs are faster (measured on a CPU; group sizes 5 to 8, completions of 32 to 550 tokens)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Spans that go into one call of scaled_dot_product_attention, padded to the largest.

    Attributes:
        shape: N, L, M.
        bias_N1LM: Added to the scores: 0, or -inf where a query does not attend; None is a causal mask, L = M.
    """

    shape: tuple[int, int, int]
    bias_N1LM: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row as blocks, one after the other.

    Attributes:
        queries: Positions in the row of all blocks' queries, padding included.
        keys: Positions of their keys, likewise.
        place_S: Place of each position of the row in the queries' order.
    """

    blocks: tuple[Block, ...]
    queries: torch.Tensor
    keys: torch.Tensor
    place_S: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bounds:
    """A row as torch's variable-length attention takes it.

    Attributes:
        queries: int32 starts of each span, and the row's end.
        keys: Likewise for each span's keys, its prefix first, in the order of ``key_order``.
        longest: Most queries and most keys of a span.
        key_order: Positions in the row; None for the row's own order.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest: tuple[int, int]
    key_order: torch.Tensor | None


class PackedLayout:
    """The spans of a packed row, prepared for an attention function once, for all layers and passes.

    Args:
        spans: All tokens of the row, in order, each once; empty ones are left out.
        dtype: Element type of queries, keys and values.
    """

    def __init__(self, spans: Sequence[Span], device: str, dtype: torch.dtype) -> None:
        self._spans = [span for span in spans if span.length]
        self._device, self._dtype = device, dtype

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return sum(span.pairs for span in self._spans)

    @cached_property
    def bounds(self) -> Bounds:
        lengths = [span.length for span in self._spans]
        keys = [span.prefix_length + span.length for span in self._spans]
        shares = any(span.prefix_length for span in self._spans)
        places = [places(span) for span in self._spans for places in (_prefix, _positions)]
        order = self._tensor(np.concatenate(places)) if shares else None
        starts, key_starts = (self._tensor(offsets(sizes)).int() for sizes in (lengths, keys))
        return Bounds(starts, key_starts, (max(lengths), max(keys)), order)

    @cached_property
    def blocks(self) -> Blocks:
        batches: dict[tuple[bool, int, int], list[list[Span]]] = {}
        for chunk in _chunks(self._spans):
            queries = sum(span.length for span in chunk)
            size = rounded(queries), rounded(queries + chunk[0].prefix_length)
            batches.setdefault((chunk[0].prefix_length == 0, *size), []).append(chunk)
        made = [self._block(chunks) for chunks in batches.values()]
        query_order, key_order = (np.concatenate(orders) for orders in zip(*(found[1:] for found in made), strict=True))
        place_S = np.zeros(sum(span.length for span in self._spans), np.int64)
        # Padding repeats positions: the first place of a position has the right answer.
        place_S[query_order[::-1]] = np.arange(len(query_order))[::-1]
        return Blocks(tuple(block for block, *_ in made), *map(self._tensor, (query_order, key_order, place_S)))

    def _block(self, chunks: Sequence[Sequence[Span]]) -> tuple[Block, IntArray, IntArray]:
        """Chunks as one block, with the positions of its queries and keys."""
        queries = [np.concatenate([_positions(span) for span in chunk]) for chunk in chunks]
        keys = [
            np.concatenate([_prefix(chunk[0]), positions]) for chunk, positions in zip(chunks, queries, strict=True)
        ]
        L, M = max(map(len, queries)), max(map(len, keys))
        bias = None
        if chunks[0][0].prefix_length:
            allowed_NLM = np.zeros((len(chunks), L, M), bool)
            for allowed_LM, chunk in zip(allowed_NLM, chunks, strict=True):
                allowed_LM[:, : chunk[0].prefix_length] = True
                for start, span in zip(offsets(span.length for span in chunk), chunk, strict=False):
                    first = start + chunk[0].prefix_length
                    own = np.tri(span.length, dtype=bool)
                    allowed_LM[start : start + span.length, first : first + span.length] = own
            masked = self._tensor(~allowed_NLM[:, None])
            bias = torch.zeros(masked.shape, dtype=self._dtype, device=self._device).masked_fill_(masked, -torch.inf)
        padded_queries, padded_keys = (
            np.concatenate([np.pad(each, (0, size - len(each)), mode="edge") for each in found])
            for found, size in ((queries, L), (keys, M))
        )
        return Block((len(chunks), L, M), bias), padded_queries, padded_keys

    def _tensor(self, values: Any) -> torch.Tensor:
        return device.moved(torch.from_numpy(np.asarray(values)), self._device)


def rounded(size: int) -> int:
    """A size rounded up, by less than a quarter of it or by less than 8. Sizes that round to the same are padded to
    it."""
    step = max(8, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step


def _chunks(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans of the same prefix that one call computes together. A span without a prefix is alone."""
    chunk: list[Span] = []
    for span in spans:
        wider = [*chunk, span]
        queries = sum(each.length for each in wider)
        computed, needed = queries * (queries + span.prefix_length), sum(each.pairs for each in wider)
        fits = chunk and span.prefix_length and span.prefix_start == chunk[0].prefix_start
        if fits and chunk[0].prefix_length and computed <= MASKED * needed:
            chunk = wider
            continue
        if chunk:
            yield chunk
        chunk = [span]
    yield chunk


def _positions(span: Span) -> IntArray:
    return np.arange(span.start, span.start + span.length)


def _prefix(span: Span) -> IntArray:
    return np.arange(span.prefix_start, span.prefix_start + span.prefix_length)


def packed_sdpa(
    module: torch.nn.Module,
    query_1HSD: torch.Tensor,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
    attention_mask: None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, S, H, D): scaled dot-product attention, one batched call for all chunks of spans of about one size."""
    row = layout.blocks
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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(1, S, H, D): torch's variable-length attention (CUDA, half precision), one call for the whole row."""
    row = layout.bounds
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HSD, key_1KSD, value_1KSD))
    if row.key_order is not None:
        k, v = rows_at(k, row.key_order), rows_at(v, row.key_order)
    # Causal, aligned at the last query and the last key.
    return _varlen(q, k, v, row.queries, row.keys, *row.longest, scale=scaling, window_size=(-1, 0))[None], None


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


def rows_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The values of some positions, which may repeat; their gradients are added up in a fixed order.

    On a GPU the gradient of ``index_select`` is added up in any order, and in the values' own precision. Indexing
    sorts it first and sums in float32. On a CPU it is indexing whose threads add in any order.
    """
    return values[places] if values.is_cuda else values.index_select(0, places)


KERNELS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {
    "mmrl_packed_sdpa": packed_sdpa,
    "mmrl_packed_varlen": packed_varlen,
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
