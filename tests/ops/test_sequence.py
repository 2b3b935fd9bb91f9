"""Heads, tokens and images that are divided among the ranks that share a row."""

from __future__ import annotations

import pytest

from mmrl.ops.cost import ModelShape, Work, causal_pairs
from mmrl.ops.layer_shapes import LinearAttentionShape, UnevenLayers
from mmrl.ops.sequence import RowPart, exchanged_numbers, possible_sizes, repeated_heads, repeats_of, undivided


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


def test_a_row_that_a_rank_has_alone_is_its_part():
    row = Work(tokens=7, pairs=causal_pairs(7), predicted=3, patches=64)
    assert RowPart.of(row, 1, [Work(patches=64)]) == RowPart(row, row, 1)


def test_the_part_of_the_rank_that_holds_most_has_whole_images():
    images = [Work(patches=n, image_pairs=n * n) for n in (10, 70, 20, 30)]
    row = sum(images, Work(tokens=50, pairs=causal_pairs(50), predicted=40))
    part = RowPart.of(row, 4, images)
    assert (part.own.tokens, part.own.predicted, part.own.pairs) == (13, 13, 319)  # 1275 pairs
    assert (part.own.patches, part.own.image_pairs) == (70, 70 * 70)  # one image is not divided
    assert RowPart.of(row, 2, images).own.patches == 70  # beside 30 + 20 + 10
    assert RowPart.of(row, 2, [*images, Work(patches=15)]).own.patches == 75
    assert RowPart.of(row, 2).own.patches == 0


def test_numbers_that_a_rank_sends_are_those_of_the_other_ranks_heads():
    # Of a token's 8 + 8 numbers of each query head and its output, and 2 x 8 of each head of keys and values.
    assert exchanged_numbers(shape(4, 4), 2) == (4 * 16 + 4 * 16) // 2
    assert exchanged_numbers(shape(8, 2), 4) == (8 * 16 + 4 * 16) * 3 // 4  # two heads, each there twice
    assert exchanged_numbers(shape(4, 4), 1) == 0
    # A layer that attends, and one of linear attention: queries and keys of 2 heads, values and outputs of 4, and two
    # numbers that decide about each head's state.
    assert exchanged_numbers(shape(4, 4, linear=(2, 4)), 2) == (4 * 16 + 4 * 16 + 2 * 16 + 2 * 32 + 2 * 4) // 4
