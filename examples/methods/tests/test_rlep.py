"""RLEP: the newest successes of a prompt are in each of its groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, make_rollouts, replay
from mmrl.types import Experience, RolloutGroup, ScoredGroup
from mmrl_methods.rlep import RLEP

ROLLOUTS = make_rollouts(["a", "b", "c", "d"])
GROUP = ScoredGroup(
    RolloutGroup(ROLLOUTS[0].prompt, tuple(ROLLOUTS)), np.ones(4), np.ones(4, bool), {"math": np.ones(4)}
)


def algorithm(**options: Any) -> RLEP:
    return RLEP(RLEP.Config(**options))


def test_the_newest_successes_take_the_last_places() -> None:
    kept = [Experience(each, 1.0, {}) for each in ROLLOUTS]
    assert algorithm().recall(GROUP, kept) == {3: 3, 2: 2}
    assert algorithm().recall(GROUP, kept[:1]) == {3: 0}
    assert algorithm(replayed=3).recall(GROUP, kept[:3]) == {3: 2, 2: 1, 1: 0}


def test_a_group_has_new_completions_too() -> None:
    facts = RunFacts(3, 1, 8, 1, rewards=("math",), accuracy="math")
    assert algorithm().check(facts) == ()
    with pytest.raises(ValueError, match=r"replayed is 2 of a group of 2, and none would be new"):
        algorithm().check(replace(facts, group_size=2))
    with pytest.raises(ValueError, match="buffer keeps 1"):
        algorithm(buffer=1).check(facts)


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """Advantages 1 and -1 over sqrt(2), a mean over all three tokens; at a ratio of e the good one is clipped."""
    old = np.array([[-1.0, -1.0], [-2.0, 0.0]])
    batch = {
        "group_ids": [0, 0],
        "rewards": [1.0, 0.0],
        "recalled": [1, 0],
        "response_mask": [[1, 1], [1, 0]],
        "old_log_probs": old,
        "log_probs": old + np.array([[0.0, 1.0], [1.0, 0.0]]),
        "rollout_log_probs": old,
    }
    found, a = replay("rlep", batch), 1 / np.sqrt(2)
    np.testing.assert_allclose(found.grad_log_probs, [[-a / 3, 0.0], [a * np.e / 3, 0.0]], rtol=1e-5)
    assert found.loss == pytest.approx((-a - 1.28 * a + np.e * a) / 3, rel=1e-5)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("rlep")
