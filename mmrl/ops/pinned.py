"""Page-locked memory of a host, as torch 2.13 takes it.

torch asks a device for memory in segments, and cuts them into blocks (``c10/core/AllocatorConfig.h``). A copy of a
segment in page-locked memory is one tensor, and torch's cache of such memory makes each as large as the next power of
two (``ATen/core/CachingHostAllocator.h``). What is freed stays in that cache, page-locked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

_MIB = 2**20
SMALL = _MIB
"""Most bytes of a small block. These share segments with one another."""
_BLOCK, _LARGE = 512, 10 * _MIB
"""Blocks are multiples of the first; from the second on they have a segment of their own."""
_SMALL_SEGMENT, _SHARED_SEGMENT, _UNIT = 2 * _MIB, 20 * _MIB, 2 * _MIB
"""Segments of small blocks, those that larger ones share, and the unit of the others."""
_WHOLE = 20 * _MIB
"""Blocks of this size on are never cut: vLLM sets ``max_split_size_mb`` so while it loads a model."""


def rounded(size: int) -> int:
    """Bytes of a page-locked tensor of ``size`` bytes."""
    return 1 << (size - 1).bit_length() if size else 0


def segments(sizes: Iterable[int]) -> list[int]:
    """Bytes of each segment that tensors of these sizes take, one after the other."""
    found = list[int]()
    small, large = list[int](), list[int]()  # free blocks
    for size in sizes:
        block = max(_up(size, _BLOCK), _BLOCK)
        free = small if block <= SMALL else large
        place = bisect_left(free, block)
        if place < len(free):  # the smallest that is large enough
            room = free.pop(place)
        else:
            room = _SMALL_SEGMENT if free is small else _SHARED_SEGMENT if block < _LARGE else _up(block, _UNIT)
            found.append(room)
        left = room - block
        if left >= _BLOCK if free is small else left > SMALL and block < _WHOLE:
            insort(free, left)
    return found


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Page-locked bytes that hold a copy of a device's segments, those of tensors of these sizes."""
    return sum(map(rounded, segments(sizes)))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def locked_bytes(sizes: Iterable[int]) -> int:
    """Page-locked bytes of tensors of these sizes."""
    return sum(map(rounded, sizes))
