"""CPPO: which completions are kept, and the loss of those against one in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay


def batch_of(rewards: list[float], groups: list[int]) -> dict[str, Any]:
    """Rows of two tokens; log-ratios to the policy before the step 0.1 and -0.3."""
    old = -0.1 * (1.0 + np.arange(2 * len(rewards)).reshape(-1, 2))
    tokens = {"response_mask": np.ones_like(old), "old_log_probs": old, "rollout_log_probs": old}
    return {"group_ids": groups, "rewards": rewards, "log_probs": old + np.array([0.1, -0.3]), **tokens}


def test_the_completions_with_the_largest_advantages_are_learned() -> None:
    """Deviations from the mean 2: -2, -1, 0 and 3. Half of four are pruned: 0 and -1, whatever their signs."""
    result = replay("cppo", batch_of([0.0, 1.0, 2.0, 5.0], [3, 3, 3, 3]))
    np.testing.assert_array_equal(result.sequence_weights > 0, [True, False, False, True])
    assert result.metrics["cppo/pruned_fraction"] == 0.5
    advantages = np.array([-2.0, 3.0]) / (np.sqrt((4 + 1 + 0 + 9) / 3) + 1e-6)
    ratios = np.exp([0.1, -0.3])
    losses = np.maximum(-advantages[:, None] * ratios, -advantages[:, None] * ratios.clip(0.8, 1.2))
    assert result.loss == pytest.approx(losses.mean())
    # The bad completion's second token is below the clip: no gradient. The others have -A rho / 4 tokens.
    expected = -advantages[:, None] * ratios / 4 * [[1, 0], [1, 1]]
    np.testing.assert_allclose(result.grad_log_probs[[0, 3]], expected, rtol=1e-6)
    assert not result.grad_log_probs[[1, 2]].any()


def test_the_number_that_is_pruned_is_rounded_down_and_never_all() -> None:
    batch = batch_of([0.0, 1.0, 2.0, 5.0], [3, 3, 3, 3])
    for rate, kept in ((0.0, 4), (0.24, 4), (0.25, 3), (0.74, 2), (0.99, 1)):
        assert (replay("cppo", batch, options={"rate": rate}).sequence_weights > 0).sum() == kept


def test_over_the_batch_a_prompt_with_equal_rewards_keeps_none() -> None:
    batch = batch_of([1.0, 0.0, 1.0, 1.0], [3, 3, 8, 8])
    assert (replay("cppo", batch).sequence_weights > 0).tolist().count(True) == 2
    over = replay("cppo", batch, options={"over": "batch"})
    np.testing.assert_array_equal(over.sequence_weights > 0, [True, True, False, False])


def test_ties_are_broken_by_the_completions_and_not_by_their_order() -> None:
    """Rewards of 0 and 1 with as many of each: all advantages have one size."""
    batch = batch_of([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [3] * 6)
    kept = replay("cppo", batch).sequence_weights > 0
    order = np.array([4, 2, 5, 0, 3, 1])
    moved = {key: np.asarray(value)[order] for key, value in batch.items()}
    np.testing.assert_array_equal(replay("cppo", moved).sequence_weights > 0, kept[order])
    assert kept.sum() == 3


@pytest.mark.parametrize("over", ["prompt", "batch"])
def test_it_keeps_the_rules_of_algorithms(over: str) -> None:
    check_algorithm("cppo", options={"over": over, "rate": 0.6})
