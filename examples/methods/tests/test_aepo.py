"""AEPO: advantages by entropy and the gradient beyond the clip, against calculations by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

RATIOS = np.array([0.5, 0.9, 1.1, 4.0])
SIZE = 0.5 / (np.sqrt(0.5) + 1e-6)
"""The advantage of a good and a bad completion."""


@pytest.fixture
def batch() -> dict[str, Any]:
    """A good and a bad completion with the same four ratios; entropies 0, 0, 2, 2 and 1, 1, 1, 1."""
    old = np.full((2, 4), -2.0)
    tokens = {"response_mask": np.ones_like(old), "old_log_probs": old, "rollout_log_probs": old}
    entropy = [[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    return {"group_ids": [1, 1], "rewards": [1.0, 0.0], "log_probs": old + np.log(RATIOS), "entropy": entropy, **tokens}


def test_loss_and_gradient_are_those_of_a_calculation_by_hand(batch: dict[str, Any]) -> None:
    """Standardised entropies -1, -1, 1, 1 and none: factors 0.7, 0.7, 1.3, 1.3 and 1. Beyond 1.2 a good token keeps the
    gradient 1.2; below 0.8 a bad one has none."""
    result = replay("aepo", batch, options={"alpha": 0.3})
    good = np.array([0.7, 0.7, 1.3, 1.3])
    weights = good * [0.5, 0.9, 1.1, 1.2], np.array([0.0, 0.9, 1.1, 4.0])
    expected = SIZE / 8 * np.array([-weights[0], weights[1]])
    np.testing.assert_allclose(result.grad_log_probs, expected, rtol=1e-5, atol=1e-12)
    values = weights[1] + [0.8, 0, 0, 0]
    assert result.loss == pytest.approx(SIZE / 8 * (values.sum() - weights[0].sum()), rel=1e-5)
    assert not result.grad_entropy.any()


def test_without_alpha_it_is_ppo_but_for_the_gradient_beyond_the_upper_clip(batch: dict[str, Any]) -> None:
    mine, ppo = (
        replay("aepo", batch, options={"alpha": 0.0}),
        replay("grpo", batch, options={"aggregation": "token-mean"}),
    )
    assert mine.loss == pytest.approx(ppo.loss)
    differs = ~np.isclose(mine.grad_log_probs, ppo.grad_log_probs)
    np.testing.assert_array_equal(np.argwhere(differs), [[0, 3]])


def test_a_sure_token_does_not_turn_the_sign_of_its_advantage(batch: dict[str, Any]) -> None:
    result = replay("aepo", batch, options={"alpha": 5.0})
    assert not result.grad_log_probs[0, :2].any() and (result.grad_log_probs[0, 2:] < 0).all()


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("aepo")
