"""The collectives of sequence parallelism: what each rank holds of a row, what it gets, and its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mmrl.engine.network.sequence import ALONE, SequenceGroup
from tests.cluster.process_ranks import run_together
from tests.engine.sequence_ranks import FEATURES, exchange, row


@pytest.mark.parametrize(
    ("size", "tokens", "bounds"),
    [(2, 7, [0, 3, 7]), (4, 7, [0, 1, 3, 5, 7]), (4, 8, [0, 2, 4, 6, 8]), (3, 3, [0, 1, 2, 3]), (1, 5, [0, 5])],
)
def test_ranks_hold_neighbouring_tokens_of_nearly_equal_number(size: int, tokens: int, bounds: list[int]) -> None:
    assert SequenceGroup(0, size).bounds(tokens) == bounds
    own = [SequenceGroup(rank, size).own(tokens) for rank in range(size)]
    assert [list(range(tokens))[part] for part in own] == [
        list(range(begin, end)) for begin, end in itertools.pairwise(bounds)
    ]


def test_a_rank_that_holds_whole_rows_exchanges_nothing() -> None:
    values = torch.arange(3.0)
    assert ALONE.summed(values) is values and ALONE.shared(values) is values


@pytest.mark.parametrize(
    ("ranks", "size", "tokens"), [(2, 2, 7), (2, 2, 1), pytest.param(4, 4, 7, marks=pytest.mark.full), (4, 2, 5)]
)
def test_ranks_exchange_tokens_for_parts_and_back_with_the_gradient_by_hand(
    ranks: int, size: int, tokens: int, warm_engines: Any
) -> None:
    found = run_together(ranks, warm_engines, exchange, size, tokens)
    assert [each["place"] for each in found] == [(rank // size, rank % size, size) for rank in range(ranks)]
    for rank, each in enumerate(found):
        number, place = divmod(rank, size)
        own = slice(*each["bounds"][place : place + 2])
        whole = row(tokens, size * FEATURES, 1000 * number)
        assert torch.equal(each["parts"], whole[:, place * FEATURES : (place + 1) * FEATURES])
        factors = torch.arange(1, size + 1).repeat_interleave(FEATURES)  # of each column, by the rank that has it
        assert torch.equal(each["back"].transpose(0, 1).flatten(1), whole[own] * factors)
        assert torch.equal(each["gradient"], row(tokens, size * FEATURES, 0)[own] * factors)
        total = torch.full((2,), sum(10.0**r for r in range(size)))
        summed, its_gradient = each["summed"]
        assert torch.equal(summed, total) and torch.equal(its_gradient, torch.full((2,), place + 1.0))
        shared, its_gradient = each["shared"]
        assert torch.equal(shared, total) and torch.equal(its_gradient, torch.full((2,), sum(range(1, size + 1)) + 0.0))
