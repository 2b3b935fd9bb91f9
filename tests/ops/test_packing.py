"""Micro-batches by token budget."""

from __future__ import annotations

import random

import pytest

from mmrl.ops.packing import offsets, plan_microbatches


def test_longest_first_each_into_the_first_that_has_room():
    assert plan_microbatches([3, 7, 5, 2, 6], 10) == [[1, 0], [4, 3], [2]]


def test_equal_lengths_keep_their_order():
    assert plan_microbatches([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]


def test_a_sample_longer_than_the_budget_is_alone():
    assert plan_microbatches([3, 50, 3], 10) == [[1], [0, 2]]


def test_no_budget_means_one_by_one_and_no_samples_no_plan():
    assert sorted(plan_microbatches([1, 2, 3], 0)) == [[0], [1], [2]]
    assert plan_microbatches([], 10) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_index_once_within_budget_and_near_the_fewest_possible(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 80))]
    plan = plan_microbatches(lengths, 128)
    assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in part) <= 128 for part in plan)
    assert len(plan) <= 11 / 9 * -(-sum(lengths) // 128) + 4  # fewest possible is at least total / budget


def test_offsets_are_the_starts_and_the_end():
    assert offsets([3, 1, 4]) == [0, 3, 4, 8]
    assert offsets([]) == [0]
