"""The checks of algorithms whose episodes branch: what they are tried on, and each rule broken once."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError, PluginError
from mmrl.interfaces import Algorithm, Branches, Needs
from mmrl.ops.branching import roots
from mmrl.testing import check_algorithm, replay
from mmrl.testing.batches import random_batch
from mmrl.testing.recorded import PER_TOKEN
from mmrl.types import Branch, Credit
from tests.faults.trees import Trees


def changed(**methods: Any) -> type[Algorithm]:
    return type("Changed", (Trees,), methods)


def test_a_sound_algorithm_passes() -> None:
    check_algorithm(Trees)
    check_algorithm(Trees, options={"per_round": 3, "latest": False})


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_tree_have_the_numbers_of_their_parents(seed: int, turns: bool) -> None:
    batch = random_batch(Needs(branches=Branches(), turns=turns), binary_rewards=False, seed=seed)
    pairs = list(zip(batch["parents"], batch["shared_tokens"], strict=True))
    children = [(row, parent, shared) for row, (parent, shared) in enumerate(pairs) if parent >= 0]
    assert len(children) >= 4 and sum(shared for _, _, shared in children) >= 3
    assert any(parent in {row for row, _, _ in children} for _, parent, _ in children) or seed != 1
    for row, parent, shared in children:
        assert parent < row and batch["group_ids"][row] == batch["group_ids"][parent]
        for name in {*PER_TOKEN, "response_mask", "turns"} & batch.keys():
            np.testing.assert_array_equal(batch[name][row, :shared], batch[name][parent, :shared])
        if turns:
            before = batch["turns"][row, shared]
            np.testing.assert_array_equal(batch["turn_rewards"][row][:before], batch["turn_rewards"][parent][:before])
    if turns:
        np.testing.assert_allclose(batch["components"]["environment"], [sum(each) for each in batch["turn_rewards"]])


class ForgetsTheTree(Trees):
    """Takes each row's root by its place in the batch."""

    def credit(self, batch: Any) -> Credit:
        first = roots(batch.branches) == np.arange(len(batch.rewards))
        return Credit(np.where(batch.valid & first, batch.rewards * np.arange(len(batch.rewards)), 0.0))


DRAWN = count()


@pytest.mark.parametrize(
    ("algorithm", "rule", "told"),
    [
        (changed(branch=lambda self, group, number: []), "places of a group of 1 episodes", "1 episodes"),
        (changed(branch=lambda self, group, number: [Branch(0, 4)] * number), "places of a group", "none is 4"),
        (changed(branch=lambda self, group, number: [Branch(3, 0)] * number), "places of a group", "not 3"),
        (
            changed(branch=lambda self, group, number: [Branch(3 * (len(group) > 3), len(group) > 3)] * number),
            "places of a group of 4 episodes", "member 3 has no turns",
        ),
        (
            changed(branch=lambda self, group, number: [Branch(next(DRAWN) % min(len(group), 3), 0)] * number),
            "branch answers the same group in one way", "Branch(member=1, turn=0)",
        ),
        (changed(needs=lambda self: Needs()), "branch is asked", "needs() has no branches"),
        (changed(branch=Algorithm.branch), "does not say where they begin", "write branch"),
        (ForgetsTheTree, "another order of rows", "ids of groups"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_what_shows_it(algorithm: type[Algorithm], rule: str, told: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_algorithm(algorithm)
    text = str(caught.value)
    assert rule in text and told in text, text


BATCH = {
    "group_ids": [5, 5, 5],
    "rewards": [1.0, 0.0, 0.5],
    "response_mask": np.ones((3, 4), bool),
    "log_probs": np.full((3, 4), -1.0),
    "rollout_log_probs": np.full((3, 4), -1.0),
    "parents": [-1, 0, 1],
    "shared_tokens": [0, 2, 3],
}


def test_a_recorded_tree_is_replayed_by_hand() -> None:
    """All three share two tokens, of mean 0.5; the last two share one more, of mean 0.25. The batch's mean is 0.5."""
    found = replay(Trees, BATCH)
    np.testing.assert_allclose(found.advantages, [[0, 0, 0.5, 0.5], [0, 0, -0.25, -0.5], [0, 0, -0.25, 0]])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"parents": [-1, 2, 0]}, "row 1 goes on from row 2"),
        ({"parents": [-1, 1, 0]}, "row 1 goes on from row 1"),
        ({"shared_tokens": [0, 2, 5]}, "row 2 goes on from row 1 after 5 tokens"),
        ({"shared_tokens": [1, 2, 3]}, "row 0 goes on from row -1 after 1 tokens"),
        ({"group_ids": [5, 4, 4]}, "row 1 goes on from row 0"),
    ],
)
def test_a_tree_that_no_run_has_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        replay(Trees, {**BATCH, **wrong})


def test_a_batch_without_trees_is_told_what_it_lacks() -> None:
    with pytest.raises(DataError, match="lacks parents, shared_tokens"):
        replay(Trees, {key: value for key, value in BATCH.items() if key not in ("parents", "shared_tokens")})
