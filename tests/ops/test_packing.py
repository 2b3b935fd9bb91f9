"""Units of samples that share a prompt, micro-batches by token budget, balanced parts."""

from __future__ import annotations

import random

import pytest

from mmrl.ops.packing import (
    Item,
    Span,
    Unit,
    balance,
    bundles_of,
    first_fit,
    offsets,
    plan_microbatches,
    shares_of,
    units_of,
)


def by_tokens(unit: Unit) -> float:
    return unit.tokens


def test_first_fit_takes_the_longest_first_each_into_the_first_that_has_room():
    assert first_fit([3, 7, 5, 2, 6], 10) == [[1, 0], [4, 3], [2]]


def test_equal_lengths_keep_their_order():
    assert first_fit([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]


def test_a_length_above_the_budget_is_alone():
    assert first_fit([3, 50, 3], 10) == [[1], [0, 2]]


def test_no_budget_means_one_by_one_and_no_samples_no_plan():
    assert sorted(first_fit([1, 2, 3], 0)) == [[0], [1], [2]]
    assert first_fit([], 10) == [] and units_of([], 10) == []
    assert plan_microbatches([], 10, by_tokens) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_index_once_within_budget_and_near_the_fewest_possible(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 80))]
    plan = first_fit(lengths, 128)
    assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in part) <= 128 for part in plan)
    assert len(plan) <= 11 / 9 * -(-sum(lengths) // 128) + 4  # fewest possible is at least total / budget


ITEMS = [Item("a", 10, 3), Item("b", 4, 6), Item("a", 10, 1), Item("a", 10, 8)]


def test_samples_of_a_prompt_are_a_unit_whose_last_tokens_predict_nothing():
    a, b = units_of(ITEMS)
    assert a == Unit((0, 2, 3), 10, (2, 0, 7)) and b == Unit((1,), 4, (5,))
    assert (a.tokens, b.tokens) == (19, 9)
    assert a.spans(100) == [Span(100, 10), Span(110, 2, 100, 10), Span(112, 0, 100, 10), Span(112, 7, 100, 10)]
    assert b.spans(119) == [Span(119, 9)]
    assert a.pairs == 55 + (20 + 3) + 0 + (70 + 28) and b.pairs == 45
    assert a.pairs_within(4) == (1 + 2 + 3 + 7 * 4) + 2 * 4 + 0 + 7 * 4 and b.pairs_within(4) == 6 + 6 * 4
    assert (a.pairs_within(100), b.pairs_within(100)) == (a.pairs, b.pairs)


def test_without_sharing_each_sample_is_a_unit():
    assert [unit.indices for unit in units_of(ITEMS, share=False)] == [(0,), (1,), (2,), (3,)]


def test_a_group_above_the_budget_is_split_and_its_prompt_repeated():
    a, rest, b = units_of(ITEMS, 17)
    assert (a.indices, rest.indices, b.indices) == ((2, 3), (0,), (1,))
    assert (a.tokens, rest.tokens) == (17, 12)
    assert sorted(unit.indices for unit in units_of(ITEMS, 5)) == [(0,), (1,), (2,), (3,)]  # nothing fits


@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_to_the_budget_are_as_few_as_first_fit_finds_and_the_dearest_comes_first(seed):
    rng = random.Random(seed)
    prompts = {name: rng.randint(1, 40) for name in range(rng.randint(1, 20))}
    items = [
        Item(name, tokens, rng.randint(1, 30)) for name, tokens in prompts.items() for _ in range(rng.randint(1, 9))
    ]
    rng.shuffle(items)
    units = units_of(items, 100)
    assert sorted(index for unit in units for index in unit.indices) == list(range(len(items)))
    plan = plan_microbatches(units, 100, lambda unit: unit.pairs)
    assert sorted(unit.indices for row in plan for unit in row) == sorted(unit.indices for unit in units)
    assert all(sum(unit.tokens for unit in row) <= 100 for row in plan)
    assert len(plan) == len(first_fit([unit.tokens for unit in units], 100))
    costs = [sum(unit.pairs for unit in row) for row in plan]
    assert costs == sorted(costs, reverse=True)


def test_rows_of_one_budget_are_of_equal_cost():
    units = [Unit((i,), size, (0,)) for i, size in enumerate([60, 60, 30, 30, 10, 10])]
    plan = plan_microbatches(units, 110, by_tokens)
    assert [sum(unit.tokens for unit in row) for row in plan] == [100, 100]  # first-fit alone: 110 and 90


def test_units_are_halved_where_there_are_fewer_than_ranks():
    unit = Unit((4, 5, 6), 10, (1, 2, 3))
    assert unit.halves() == [Unit((4,), 10, (1,)), Unit((5, 6), 10, (2, 3))]
    assert sorted(u.indices for part in shares_of([unit], 2, by_tokens) for u in part) == [(4,), (5, 6)]
    assert [len(part) for part in shares_of([unit], 5, by_tokens)] == [1, 1, 1, 0, 0]
    two = [unit, Unit((7,), 3, (1,))]
    assert shares_of(two, 2, by_tokens) == [[unit], [two[1]]]
    assert shares_of([], 2, by_tokens) == [[], []]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_group_that_stays_whole_is_in_one_micro_batch_of_one_rank(seed, share):
    """Groups of one prompt, groups above the budget and fewer groups than ranks included."""
    rng = random.Random(seed)
    groups = {group: rng.randint(1, 6) for group in range(rng.randint(1, 12))}
    items = [
        Item(f"prompt {group // 2}", 5 + group // 2, rng.randint(1, 40), group=group)
        for group, size in groups.items()
        for _ in range(size)
    ]
    rng.shuffle(items)
    ranks = shares_of(units_of(items, share=share), 3, by_tokens)
    places = [(rank, unit.group) for rank, units in enumerate(ranks) for unit in units]
    assert sorted({group for _, group in places}) == sorted(groups) and len({*places}) == len(groups)
    for units in ranks:
        own = [items[i] for unit in units for i in unit.indices]
        plan = plan_microbatches(units_of(own, 60, share=share), 60, by_tokens)
        found = [{own[i].group for unit in part for i in unit.indices} for part in plan]
        assert sum(map(len, found)) == len({item.group for item in own})
        assert all(
            sum(unit.tokens for unit in part) <= 60 or len(own) == 1 for part, own in zip(plan, found, strict=True)
        )
        assert sorted(i for part in plan for unit in part for i in unit.indices) == list(range(len(own)))


def test_two_groups_of_one_prompt_are_two_bundles_and_loose_samples_one_each():
    units = units_of([Item("a", 3, 2, group=4), Item("a", 3, 2, group=9), Item("a", 3, 5, group=4), Item("a", 3, 1)], 6)
    assert [[unit.indices for unit in bundle] for bundle in bundles_of(units)] == [[(0, 2)], [(1,)], [(3,)]]
    alone = units_of([Item("a", 3, 2, group=4), Item("a", 3, 2, group=4), Item("a", 3, 1)], share=False)
    assert [[unit.indices for unit in bundle] for bundle in bundles_of(alone)] == [[(0,), (1,)], [(2,)]]


def test_parts_are_balanced():
    assert balance([5, 1, 1, 4, 3], 2) == [[0, 1, 2], [3, 4]]


def test_offsets_are_the_starts_and_the_end():
    assert offsets([3, 1, 4]) == [0, 3, 4, 8]
    assert offsets([]) == [0]
