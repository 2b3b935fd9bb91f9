"""Segments and page-locked bytes, by the constants of torch's allocators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mmrl.ops.pinned import locked_bytes, pinned_bytes, rounded, segments

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], [2]),
        ([MIB] * 2, [2]),
        ([MIB] * 3, [2, 2]),
        ([512] * 4096, [2]),
        ([512] * 4096 + [1], [2, 2]),
        ([MIB + 1], [20]),
        ([8 * MIB] * 2, [20]),
        ([8 * MIB] * 3, [20, 20]),
        ([2 * MIB, 10 * MIB], [20]),  # what is left of a segment may serve a larger one
        ([10 * MIB, 2 * MIB], [10, 20]),
        ([11 * MIB], [12]),
        ([43 * MIB + 1], [44]),
        ([8 * MIB, 9 * MIB, 3 * MIB], [20]),
        ([8 * MIB, 9 * MIB, MIB, 3 * MIB], [20, 2]),  # small ones have segments of their own
    ],
)
def test_tensors_lie_in_segments_as_torch_cuts_them(sizes, expected):
    assert segments(sizes) == [size * MIB for size in expected]


def test_a_copy_is_as_large_as_the_next_power_of_two():
    assert [rounded(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    assert pinned_bytes([8 * MIB, 9 * MIB, 43 * MIB]) == (32 + 64) * MIB
    assert locked_bytes([3, 5]) == 4 + 8


def test_torch_still_has_these_constants():
    headers = Path(torch.__file__).parent / "include"
    text = (headers / "c10" / "core" / "AllocatorConfig.h").read_text()
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+)", text))
    expected = {"kSmallBuffer": 2 * MIB, "kMinBlockSize": 512, "kSmallSize": MIB, "kMinLargeAlloc": 10 * MIB}
    assert {name: int(found[name]) for name in expected} == expected and int(found["kRoundLarge"]) == 2 * MIB
    assert f"large_segment_size_{{{20 * MIB}}}" in text
    assert "PowerOf2Ceil" in (headers / "ATen" / "core" / "CachingHostAllocator.h").read_text()
