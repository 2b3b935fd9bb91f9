"""A packed row as layers take it: its spans as index arrays, made once for all layers and passes.

Letters: ``S`` tokens of the row; in a block: ``N`` entries, ``L`` tokens or queries and ``M`` keys of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mmrl.engine import device
from mmrl.engine.network.sequence import ALONE, SequenceGroup
from mmrl.ops.packing import Span, chunks_of, offsets
from mmrl.types import BoolArray, IntArray


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


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Spans of about one size for a layer that hands a state from token to token, padded to the longest.

    Attributes:
        shape: N, L.
        places: N * L positions in the row; padding repeats a span's last one.
        is_padding_NL: True where a token is padding.
        parents: N places among the last states of the blocks without parents: a completion's prompt. None if the
            states start at zero.
    """

    shape: tuple[int, int]
    places: torch.Tensor
    is_padding_NL: torch.Tensor
    parents: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """A row as blocks, those without parents first.

    Attributes:
        place_S: Place of each position of the row in the blocks' order.
    """

    blocks: tuple[StateBlock, ...]
    place_S: torch.Tensor


Taps = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""For each tap of a convolution, the oldest first: (S,) position of a token's input, and (S, 1) 1.0, or 0.0 where the
sequence has not begun."""


class PackedLayout:
    """The spans of a packed row, prepared for layers once, for all of them and all passes.

    Args:
        spans: All tokens of the row, in order, each once; empty ones are left out.
        dtype: Element type of queries, keys and values.
        images_S: The number of each token's image, -1 for text, where the tokens of an image see each other in layers
            with a window; None where nothing sees what comes later.
        group: The ranks that hold the row together; kept as ``group``.

    Attributes:
        tokens: S.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        device: str,
        dtype: torch.dtype,
        images_S: IntArray | None = None,
        group: SequenceGroup = ALONE,
    ) -> None:
        self._spans = [span for span in spans if span.length]
        self.group, self.tokens = group, sum(span.length for span in self._spans)
        self._device, self._dtype = device, dtype
        self._images_S = images_S if images_S is not None and (images_S >= 0).any() else None
        self._taps: dict[int, Taps] = {}
        self._windowed: dict[int, Blocks] = {}

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return sum(span.pairs for span in self._spans)

    def pairs_within(self, window: int) -> int:
        """Those of a layer with a window; pairs of an image's tokens with later ones are not counted."""
        return sum(span.pairs_within(window) for span in self._spans)

    @property
    def looks_ahead(self) -> bool:
        """True if tokens of an image see each other in layers with a window."""
        return self._images_S is not None

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
        for chunk in chunks_of(self._spans):
            queries = sum(span.length for span in chunk)
            size = rounded(queries), rounded(queries + chunk[0].prefix_length)
            batches.setdefault((chunk[0].prefix_length == 0, *size), []).append(chunk)
        return self._joined([self._block(chunks) for chunks in batches.values()])

    def windowed(self, window: int | None) -> Blocks:
        """The row's blocks for a layer in which a token sees the ``window`` last ones of its own sequence, itself
        included: its prefix counts like its own tokens. Where ``images_S`` is given, a token of an image sees the later
        ones of that image too.

        Args:
            window: None for all tokens before it.
        """
        longest = max(span.prefix_length + span.length for span in self._spans)
        if window is None or (longest <= window and self._images_S is None):
            return self.blocks
        if window not in self._windowed:
            batches: dict[tuple[bool, int, int], list[WindowPiece]] = {}
            for span in self._spans:
                for piece in window_pieces(span, window, self._images_S):
                    size = rounded(len(piece.queries)), rounded(len(piece.keys))
                    batches.setdefault((piece.allowed_LM is None, *size), []).append(piece)
            self._windowed[window] = self._joined([self._window_block(pieces) for pieces in batches.values()])
        return self._windowed[window]

    def _joined(self, made: Sequence[tuple[Block, IntArray, IntArray]]) -> Blocks:
        """Blocks, with the positions of their queries and keys, as a row."""
        query_order, key_order = (np.concatenate(orders) for orders in zip(*(found[1:] for found in made), strict=True))
        place_S = np.zeros(self.tokens, np.int64)
        # Padding repeats positions: the first place of a position has the right answer.
        place_S[query_order[::-1]] = np.arange(len(query_order))[::-1]
        return Blocks(tuple(block for block, *_ in made), *map(self._tensor, (query_order, key_order, place_S)))

    @cached_property
    def states(self) -> StateBlocks:
        roots = [span for span in self._spans if not span.prefix_length]
        groups: dict[tuple[bool, int], list[Span]] = {}
        for span in (*roots, *(span for span in self._spans if span.prefix_length)):
            groups.setdefault((span.prefix_length > 0, rounded(span.length)), []).append(span)
        in_order = [span for (follows, _), spans in groups.items() if not follows for span in spans]
        place_of = {(span.start, span.length): place for place, span in enumerate(in_order)}
        blocks, position_of = list[StateBlock](), list[IntArray]()
        for (follows, _), spans in groups.items():
            L = max(span.length for span in spans)
            places = [np.pad(_positions(span), (0, L - span.length), mode="edge") for span in spans]
            lengths_N = np.array([span.length for span in spans])
            parents = [place_of[span.prefix_start, span.prefix_length] for span in spans] if follows else None
            blocks.append(
                StateBlock(
                    (len(spans), L),
                    self._tensor(np.concatenate(places)),
                    self._tensor(np.arange(L) >= lengths_N[:, None]),
                    None if parents is None else self._tensor(np.array(parents)),
                )
            )
            position_of += places
        order = np.concatenate(position_of)
        place_S = np.zeros(self.tokens, np.int64)
        place_S[order[::-1]] = np.arange(len(order))[::-1]  # padding repeats a position: its first place is right
        return StateBlocks(tuple(blocks), self._tensor(place_S))

    def taps(self, count: int) -> Taps:
        """The inputs of a causal convolution of ``count`` taps."""
        if count not in self._taps:
            places, there = list[torch.Tensor](), list[torch.Tensor]()
            for back in reversed(range(count)):
                found = [_before(span, back) for span in self._spans]
                place_S = np.concatenate(found)
                places.append(self._tensor(np.maximum(place_S, 0)))
                there.append(self._tensor((place_S >= 0).astype(np.float32)[:, None]))
            self._taps[count] = places, there
        return self._taps[count]

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
            bias = self._bias(allowed_NLM)
        return Block((len(chunks), L, M), bias), _padded(queries, L), _padded(keys, M)

    def _window_block(self, pieces: Sequence[WindowPiece]) -> tuple[Block, IntArray, IntArray]:
        """Pieces as one block, with the positions of its queries and keys."""
        queries, keys = [piece.queries for piece in pieces], [piece.keys for piece in pieces]
        L, M = max(map(len, queries)), max(map(len, keys))
        bias = None
        if pieces[0].allowed_LM is not None:
            allowed_NLM = np.zeros((len(pieces), L, M), bool)
            allowed_NLM[:, :, 0] = True  # padding has to see something; it is not used
            for allowed_LM, piece in zip(allowed_NLM, pieces, strict=True):
                assert piece.allowed_LM is not None
                allowed_LM[: len(piece.queries)] = False
                allowed_LM[: len(piece.queries), : len(piece.keys)] = piece.allowed_LM
            bias = self._bias(allowed_NLM)
        return Block((len(pieces), L, M), bias), _padded(queries, L), _padded(keys, M)

    def _bias(self, allowed_NLM: BoolArray) -> torch.Tensor:
        masked = self._tensor(~allowed_NLM[:, None])
        return torch.zeros(masked.shape, dtype=self._dtype, device=self._device).masked_fill_(masked, -torch.inf)

    def _tensor(self, values: Any) -> torch.Tensor:
        return device.moved(torch.from_numpy(np.asarray(values)), self._device)


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """Neighbouring tokens of a span in a layer with a window, with all that they see.

    Attributes:
        queries: Positions in the row.
        keys: Positions in the row, in the order of the span's sequence.
        allowed_LM: True where a query attends to a key; None for a causal mask, where both are the same tokens.
    """

    queries: IntArray
    keys: IntArray
    allowed_LM: BoolArray | None


def window_pieces(span: Span, window: int, images_S: IntArray | None = None) -> Iterator[WindowPiece]:
    """A span in pieces of ``window`` queries, each with at most twice as many keys, and those of images that it is in.

    Args:
        images_S: See ``PackedLayout``.
    """
    sequence = np.concatenate([_prefix(span), _positions(span)])
    images = None if images_S is None else images_S[sequence]
    for first in range(span.prefix_length, len(sequence), window):
        end = min(first + window, len(sequence))
        begin, stop = max(first - window + 1, 0), end
        if images is not None and images[end - 1] >= 0:  # to the end of that image
            stop = end + int(np.argmax(np.append(images[end:], -1) != images[end - 1]))
        queries, keys = np.arange(first, end), np.arange(begin, stop)
        seen_LM = keys <= queries[:, None]
        if images is not None:
            seen_LM |= (images[queries][:, None] == images[keys]) & (images[keys] >= 0)
        seen_LM &= keys > queries[:, None] - window
        plain = begin == first and stop == end and np.array_equal(seen_LM, np.tri(end - first, dtype=bool))
        yield WindowPiece(sequence[queries], sequence[keys], None if plain else seen_LM)


def _padded(found: Sequence[IntArray], size: int) -> IntArray:
    """Positions of several entries, each repeated at its end to ``size``."""
    return np.concatenate([np.pad(each, (0, size - len(each)), mode="edge") for each in found])


def rounded(size: int) -> int:
    """A size rounded up, by less than a quarter of it or by less than 8. Sizes that round to the same are padded to
    it."""
    step = max(8, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step


def _positions(span: Span) -> IntArray:
    return np.arange(span.start, span.start + span.length)


def _before(span: Span, back: int) -> IntArray:
    """Positions of the tokens ``back`` places before those of a span, in its prefix if need be; -1 for none."""
    head = min(back, span.length)
    before = span.prefix_start + span.prefix_length - back + np.arange(head)
    before[before < span.prefix_start] = -1
    if not span.prefix_length:
        before[:] = -1
    return np.concatenate([before, _positions(span)[: span.length - head]])


def _prefix(span: Span) -> IntArray:
    return np.arange(span.prefix_start, span.prefix_start + span.prefix_length)


def rows_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The values of some positions, which may repeat; their gradients are added up in a fixed order.

    On a GPU the gradient of ``index_select`` is added up in any order, and in the values' own precision. Indexing
    sorts it first and sums in float32. On a CPU it is indexing whose threads add in any order.
    """
    return values[places] if values.is_cuda else values.index_select(0, places)
