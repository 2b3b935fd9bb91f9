"""The heads of networks whose rows ranks share (Jacobs et al., 2023, arXiv:2309.14509, section 3).

Each of S ranks holds a slice of a row's tokens. Within a layer that mixes tokens it holds all tokens of 1/S of the
heads, so S divides the heads. Heads of keys and values that several query heads share may be fewer: they are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from mmrl.ops.cost import ModelShape


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
