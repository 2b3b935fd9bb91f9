"""Tree-GRPO against calculations by hand: advantages, and the places from which episodes go on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import Branches, RunFacts
from mmrl.testing import check_algorithm, make_rollouts
from mmrl.types import Batch, Branch, BranchedRows, PlayedTurn, Rollout, Turn
from mmrl_methods.tree_grpo import TreeGRPO, tree_of


def batch(rewards: list[float], parents: list[int], shared: list[int], valid: list[bool] | None = None) -> Batch:
    """One prompt's episodes of three tokens each."""
    count = len(rewards)
    return Batch(
        rewards=np.array(rewards),
        valid=np.array(valid or [True] * count),
        group_ids=np.zeros(count, np.int64),
        masks=[np.ones(3, bool)] * count,
        truncated=np.zeros(count, bool),
        components={"environment": np.array(rewards)},
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[np.zeros(3)] * count,
        branches=BranchedRows(np.array(parents), np.array(shared)),
    )


def episode(index: int, turns: int, branch: Branch | None = None) -> Rollout:
    (made,) = make_rollouts([f"episode {index}"])
    played = tuple(PlayedTurn(Turn("go", (), number, "stop", 9)) for number in range(turns))
    return replace(made, index=index, episode=played, branch=branch)


def test_advantages_are_those_of_a_calculation_by_hand() -> None:
    """Trees {0, 2, 3} and {1, 4, 5}, of which 3 goes on from 2 and 5 from the prompt of 1.

    Rewards 1, 0, 0, 1, 0, 0 have mean 1/3 and deviation sqrt(4/15). The first tree's are 1, 0, 1: mean 2/3, deviation
    sqrt(1/3), so 1/sqrt(3) and -2/sqrt(3). The second's are all 0.
    """
    given = batch([1, 0, 0, 1, 0, 0], [-1, -1, 0, 2, 1, 1], [0, 0, 1, 2, 1, 0])
    inter = (np.array([1, 0, 0, 1, 0, 0]) - 1 / 3) / np.sqrt(4 / 15)
    intra = np.array([1, 0, -2, 1, 0, 0]) / np.sqrt(3)
    for weights, expected in (((1, 1), inter + intra), ((1, 0), intra), ((0.5, 2), 0.5 * intra + 2 * inter)):
        algorithm = TreeGRPO(TreeGRPO.Config(intra=weights[0], inter=weights[1]))
        credit = algorithm.credit(given)
        np.testing.assert_allclose(credit.advantages, expected, rtol=1e-5, atol=1e-9)
    assert credit.metrics["group/mixed_trees_fraction"] == 0.5


def test_an_episode_that_failed_is_in_no_statistics() -> None:
    whole = batch([1, 0, 0, 1, 0, 9], [-1, -1, 0, 2, 1, 1], [0, 0, 1, 2, 1, 1], [True] * 5 + [False])
    credit = TreeGRPO(TreeGRPO.Config(inter=0.0)).credit(whole)
    np.testing.assert_allclose(credit.advantages, np.array([1, 0, -2, 1, 0, 0]) / np.sqrt(3), rtol=1e-5, atol=1e-9)


def test_trees_begin_at_the_prompt() -> None:
    assert tree_of(np.array([-1, -1, 0, 1, 2, 4, -1])).tolist() == [0, 1, 0, 1, 0, 0, 6]


def test_each_tree_grows_from_its_own_nodes() -> None:
    """The first tree has the nodes 0, 1 and 2 of episode 0; the second those of 1, and what 2 has after its branch."""
    group = [episode(0, 3), episode(1, 1), episode(2, 4, Branch(1, 0))]
    algorithm, drawn = TreeGRPO(TreeGRPO.Config(trees=2, expansions=40)), Counter[Branch]()
    found = algorithm.branch(group, 80)
    assert {(each.member, each.turn) for each in found[:40]} == {(0, 0), (0, 1), (0, 2)}
    assert {(each.member, each.turn) for each in found[40:]} == {(1, 0), (2, 1), (2, 2), (2, 3)}
    drawn.update(found)
    assert min(drawn.values()) >= 3
    assert algorithm.branch(group, 80) == found
    assert algorithm.branch([replace(group[0], index=5), *group[1:]], 80) != found


def test_the_others_grow_in_place_of_a_tree_without_a_turn() -> None:
    found = TreeGRPO(TreeGRPO.Config(trees=2, expansions=1)).branch([episode(0, 0), episode(1, 1)], 2)
    assert found == [Branch(1, 0), Branch(1, 0)]


def test_the_group_has_the_size_of_its_trees() -> None:
    algorithm = TreeGRPO(TreeGRPO.Config(trees=2, expansions=1, rounds=3))
    assert algorithm.needs().branches == Branches(rounds=3, per_round=2)
    facts = RunFacts(8, 1, 8, 1, rewards=("environment",))
    assert algorithm.check(facts) == ()
    with pytest.raises(ValueError, match=r"2 trees of 4 episodes are 8, and sampler\.group_size is 6; set it to 8"):
        algorithm.check(replace(facts, group_size=6))


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("tree_grpo")
    options: dict[str, Any] = {"trees": 1, "expansions": 1, "inter": 0.0}
    check_algorithm("tree_grpo", options=options)
