"""Rows that ranks share, and the heads of their networks (Jacobs et al., 2023, arXiv:2309.14509, section 3).

Each of S ranks holds a slice of a row's tokens. Within a layer that mixes tokens it holds all tokens of 1/S of the
heads, so S divides the heads. Heads of keys and values that several query heads share may be fewer: they are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mmrl.ops.cost import ModelShape, Work


@dataclass(frozen=True, slots=True)
class RowPart:
    """One rank's part of a packed row that several may share.

    Attributes:
        row: The whole row.
        own: Its slice of tokens, its heads' pairs of tokens, and the images that it encodes; most of all ranks.
        size: Ranks that share the row.
    """

    row: Work
    own: Work
    size: int = 1

    @classmethod
    def of(cls, row: Work, size: int, images: Sequence[Work] = ()) -> RowPart:
        """The part of the rank that holds most.

        Args:
            images: Passes of the row's images through the tower. Each is made on one rank, whole; the largest goes
                first, to the rank with the fewest patches so far.
        """
        if size == 1:
            return cls(row, row)
        towers = [Work()] * size
        for image in sorted(images, key=lambda each: -each.patches):
            least = min(range(size), key=lambda rank: towers[rank].patches)
            towers[least] = towers[least] + image
        tokens, tower = -(-row.tokens // size), max(towers, key=lambda each: each.patches)
        pairs, local = -(-row.pairs // size), -(-row.local_pairs // size)
        return cls(row, Work(tokens, pairs, min(row.predicted, tokens), local_pairs=local) + tower, size)


def repeats_of(key_heads: int, size: int) -> int:
    """Times that each head of keys and values is repeated, so that ``size`` ranks have equally many.

    It is the least number that does: S / gcd(K, S). Where S divides the query heads it also divides the query heads
    that share one head of keys and values, so that each copy serves a whole number of them.
    """
    return size // math.gcd(key_heads, size)


def undivided(shape: ModelShape, size: int) -> str:
    """The reason why ``size`` ranks cannot divide a network's heads; empty if they can.

    A vision tower stands in no way: each image goes through it on one rank.
    """
    if shape.heads % size:
        return f"it has {shape.heads} attention heads"
    if (linear := shape.linear) is not None and linear.value_heads % size:
        return f"its linear attention has {linear.value_heads} heads of values"
    return ""


def possible_sizes(shapes: Iterable[ModelShape], ranks: int) -> list[int]:
    """Numbers of ranks that may share a row: those that divide the learner's ranks, and every network's heads."""
    known = list(shapes)
    sizes = (size for size in range(1, ranks + 1) if ranks % size == 0)
    return [size for size in sizes if not any(undivided(shape, size) for shape in known)]


def repeated_heads(shape: ModelShape, size: int) -> Iterator[str]:
    """Clauses that name the heads of keys and values that are repeated on ``size`` ranks, such as ``2 heads of keys and
    values, each 2 times``."""
    for heads in sorted({shape.kv_heads, *(shape.uneven.kv_heads if shape.uneven is not None else ())}):
        if (times := repeats_of(heads, size)) > 1:
            yield f"{heads} heads of keys and values, each {times} times"
    if (linear := shape.linear) is not None and (times := repeats_of(linear.key_heads, size)) > 1:
        yield f"{linear.key_heads} heads of keys in linear attention, each {times} times"


def exchanged_numbers(shape: ModelShape, size: int) -> int:
    """The numbers of a token that a rank sends to the others in a layer's forward pass, on average of the layers.

    Each rank keeps 1/S of queries, keys, values and outputs; see the source above, section 3.2. A backward pass sends
    as many, and one that computes the layer again sends them twice.
    """
    kv_heads = shape.kv_heads * repeats_of(shape.kv_heads, size)
    numbers = shape.attending_layers * 2 * shape.head_size * (shape.heads + kv_heads)
    if (linear := shape.linear) is not None:
        keys = linear.key_heads * repeats_of(linear.key_heads, size) * linear.key_size
        numbers += linear.layers * (2 * keys + 2 * linear.values + 2 * linear.value_heads)
    return numbers * (size - 1) // (size * shape.layers)
