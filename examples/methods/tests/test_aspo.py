"""ASPO: weights and gradients of single tokens against a calculation by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

RATIOS = np.array([0.25, 0.5, 0.9, 1.1, 1.3, 4.0])


@pytest.fixture
def batch() -> dict[str, Any]:
    """A good and a bad completion, advantages 1/sqrt(2) and -1/sqrt(2), with the same six ratios."""
    old = np.full((2, 6), -2.0)
    tokens = {"response_mask": np.ones_like(old), "old_log_probs": old, "rollout_log_probs": old}
    return {"group_ids": [1, 1], "rewards": [1.0, 0.0], "log_probs": old + np.log(RATIOS), **tokens}


def test_weights_are_those_of_a_calculation_by_hand(batch: dict[str, Any]) -> None:
    """Good: 1/rho up to 3, clipped where rho > 1.2. Bad: rho up to 3, clipped where rho < 0.8. A clipped token has a
    loss and no gradient."""
    result = replay("aspo", batch)
    size, tokens = 0.5 / (np.sqrt(0.5) + 1e-6), 12
    good, bad = [3.0, 2.0, 1 / 0.9, 1 / 1.1, 0.0, 0.0], [0.0, 0.0, 0.9, 1.1, 1.3, 3.0]
    expected = size / tokens * np.array([np.negative(good), bad])
    np.testing.assert_allclose(result.grad_log_probs, expected, rtol=1e-5, atol=1e-12)
    values = [3.0, 2.0, 1 / 0.9, 1 / 1.1, 1 / 1.3, 0.25], [0.25, 0.5, 0.9, 1.1, 1.3, 3.0]
    assert result.loss == pytest.approx(size / tokens * (sum(values[1]) - sum(values[0])), rel=1e-5)
    clipped = {"high": 2, "low": 2, "dual": 2}
    assert {s: result.metrics[f"policy/clip_fraction_{s}"] for s in clipped} == pytest.approx(
        {side: number / tokens for side, number in clipped.items()}
    )


def test_a_good_token_that_became_less_likely_counts_more_than_in_ppo(batch: dict[str, Any]) -> None:
    """Its weight is turned over: 1/rho where PPO has rho, so they are equal for tokens that have not moved."""
    gradient = replay("aspo", batch).grad_log_probs[0]
    still = replay("aspo", {**batch, "log_probs": batch["old_log_probs"]}).grad_log_probs[0]
    assert abs(gradient[1]) == pytest.approx(2 * abs(still[1]), rel=1e-5)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("aspo")
    check_algorithm("aspo", options={"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "kl": {"coef": 0.1}})
