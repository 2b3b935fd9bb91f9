"""The replaying ARPO: what it keeps, which groups it helps, and the advantages that follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, make_rollouts, replay
from mmrl.types import Experience, RolloutGroup, ScoredGroup
from mmrl_methods.arpo_replay import ReplayARPO


def group(rewards: list[float], word: str = "text") -> ScoredGroup:
    """A group with these rewards, NaN where invalid."""
    rollouts = make_rollouts([f"{word} {place}" for place in range(len(rewards))])
    values = np.array(rewards)
    valid = ~np.isnan(values)
    made = RolloutGroup(rollouts[0].prompt, tuple(rollouts))
    return ScoredGroup(made, np.where(valid, values, 0.0), valid, {"environment": values})


def kept(count: int) -> list[Experience]:
    return [Experience(each, 1.0, {}) for each in make_rollouts([f"success {place}" for place in range(count)])]


def algorithm(**options: Any) -> ReplayARPO:
    return ReplayARPO(ReplayARPO.Config(**options))


def test_successes_are_kept() -> None:
    assert list(algorithm().remember(group([0.0, 1.0, 0.1, 0.2, np.nan]))) == [1, 3]
    assert list(algorithm(success=0.5).remember(group([0.4, 0.6]))) == [1]
    assert algorithm(buffer=3).needs().experience == 3


@pytest.mark.parametrize(
    ("rewards", "helped"),
    [
        ([0.0, 0.0, 0.0], True),
        ([0.0, 1.0, 0.0], False),
        ([0.19, 0.19], True),
        ([0.2, 0.2], False),
        ([0.0, 0.12], False),  # a deviation of 0.06
        ([np.nan, 0.0], True),
        ([np.nan, np.nan], False),
    ],
)
def test_a_group_that_failed_has_a_success_in_place_of_its_first_member(rewards: list[float], helped: bool) -> None:
    assert algorithm().recall(group(rewards), kept(1)) == ({0: 0} if helped else {})


def test_all_successes_have_their_turn_and_the_same_group_has_the_same_one() -> None:
    chosen = [algorithm().recall(group([0.0, 0.0], f"group {number}"), kept(4))[0] for number in range(60)]
    assert set(chosen) == {0, 1, 2, 3}
    assert algorithm().recall(group([0.0, 0.0], "group 7"), kept(4)) == {0: chosen[7]}


def test_advantages_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """A success among three failures: mean 1/4, deviation 1/2, so 3/2 and -1/2. Ratios are 1, 1.35, 1 and 0.5.

    The second, of a negative advantage, keeps its gradient above the clip; the fourth, below it, has none.
    """
    old = np.full((4, 1), -1.0)
    ratios = np.array([[1.0], [1.35], [1.0], [0.5]])
    batch = {
        "group_ids": [0] * 4,
        "rewards": [1.0, 0.0, 0.0, 0.0],
        "recalled": [1, 0, 0, 0],
        "response_mask": np.ones((4, 1)),
        "old_log_probs": old,
        "log_probs": old + np.log(ratios),
        "rollout_log_probs": old,
    }
    found = replay("arpo_replay", batch)
    assert found.metrics["experience/recalled_fraction"] == 0.25
    np.testing.assert_allclose(found.advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(found.grad_log_probs[:, 0], [-1.5 / 4, 0.5 * 1.35 / 4, 0.5 / 4, 0.0], rtol=1e-5)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("arpo_replay")
