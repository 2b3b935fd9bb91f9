"""Heads that are divided among the ranks that share a row."""

from __future__ import annotations

import pytest

from mmrl.ops.cost import ModelShape
from mmrl.ops.layer_shapes import LinearAttentionShape, UnevenLayers
from mmrl.ops.sequence import possible_sizes, repeated_heads, repeats_of, undivided


def shape(heads: int, kv_heads: int, linear: tuple[int, int] | None = None, uneven: tuple[int, ...] = ()) -> ModelShape:
    of_linear = None if linear is None else LinearAttentionShape(1, *linear, key_size=8, value_size=8, taps=4)
    layers = UnevenLayers(1, 1, 1, kv_heads=uneven) if uneven else None
    sizes = {"layers": 2, "width": 8, "head_size": 8, "mlp_width": 8, "vocabulary": 8}
    return ModelShape(heads=heads, kv_heads=kv_heads, linear=of_linear, uneven=layers, **sizes)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_repeats_are_the_fewest_that_give_each_rank_whole_heads_of_whole_groups(size):
    for kv_heads in range(1, 13):
        counted = next(times for times in range(1, size + 1) if kv_heads * times % size == 0)
        assert repeats_of(kv_heads, size) == counted
        for shared in range(1, 13):  # query heads for each head of keys and values
            if kv_heads * shared % size == 0:
                assert shared % counted == 0


def test_query_heads_and_heads_of_linear_attention_stand_in_the_way_of_sizes():
    assert [n for n in range(1, 13) if not undivided(shape(12, 2), n)] == [1, 2, 3, 4, 6, 12]
    assert undivided(shape(14, 2), 4) == "it has 14 attention heads"
    mixed = shape(8, 2, linear=(2, 6))
    assert [n for n in range(1, 9) if not undivided(mixed, n)] == [1, 2]
    assert undivided(mixed, 4) == "its linear attention has 6 heads of values"


def test_possible_sizes_suit_the_ranks_and_every_network():
    assert possible_sizes([shape(12, 2)], 8) == [1, 2, 4]
    assert possible_sizes([shape(12, 2), shape(14, 2)], 8) == [1, 2]
    assert possible_sizes([shape(12, 2)], 9) == [1, 3]


def test_heads_of_keys_and_values_that_are_repeated_are_named():
    assert list(repeated_heads(shape(16, 8), 8)) == []
    assert list(repeated_heads(shape(16, 2), 8)) == ["2 heads of keys and values, each 4 times"]
    linear = list(repeated_heads(shape(8, 8, linear=(2, 8)), 4))
    assert linear == ["2 heads of keys in linear attention, each 2 times"]
    uneven = list(repeated_heads(shape(8, 4, uneven=(1, 4)), 4))  # layers that see all tokens have fewer
    assert uneven == ["1 heads of keys and values, each 4 times"]
    assert list(repeated_heads(shape(16, 6), 4)) == ["6 heads of keys and values, each 2 times"]
