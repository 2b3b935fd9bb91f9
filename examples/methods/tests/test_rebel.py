"""REBEL against a sum over pairs in plain numpy, a calculation by hand, and central differences."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

GROUPS = ([0, 2, 4], [1, 3])
"""Rows of the ragged batch whose groups have two valid rows or more."""


def square(batch: dict[str, Any], eta: float, one: int, other: int) -> float:
    """A pair's loss."""
    ratios = np.where(batch["response_mask"], batch["log_probs"] - batch["old_log_probs"], 0.0).sum(1)
    rewards = batch["rewards"]
    return float((ratios[one] - ratios[other] - eta * (rewards[one] - rewards[other])) ** 2)


def test_loss_and_gradient_of_a_pair_are_those_of_a_calculation_by_hand() -> None:
    """Log-ratios 1 and -1, rewards 1 and 0, eta 3: (2 - 3)^2 = 1, whose slope is 2 (2 - 3) = -2 in the first
    log-ratio, and 2 in the second; each token has its completion's."""
    batch = {
        "group_ids": [0, 0],
        "rewards": [1.0, 0.0],
        "response_mask": [[1, 1], [1, 0]],
        "old_log_probs": [[-1.0, -1.0], [-2.0, 0.0]],
        "log_probs": [[-0.5, -0.5], [-3.0, 0.0]],
        "rollout_log_probs": [[-1.0, -1.0], [-2.0, 0.0]],
    }
    for pairs in ("all", "extremes"):
        result = replay("rebel", batch, options={"eta": 3.0, "pairs": pairs})
        assert result.loss == pytest.approx(1.0)
        np.testing.assert_allclose(result.grad_log_probs, [[-2.0, -2.0], [2.0, 0.0]], atol=1e-12)


def test_all_pairs_are_the_mean_over_each_groups_pairs(ragged: dict[str, Any]) -> None:
    means = [np.mean([square(ragged, 0.7, *pair) for pair in combinations(rows, 2)]) for rows in GROUPS]
    result = replay("rebel", ragged, options={"eta": 0.7})
    assert result.loss == pytest.approx((3 * means[0] + 2 * means[1]) / 5)  # by the completions of each


def test_extremes_are_the_best_and_the_worst_of_each_group(ragged: dict[str, Any]) -> None:
    result = replay("rebel", ragged, options={"eta": 0.7, "pairs": "extremes"})
    assert result.loss == pytest.approx((square(ragged, 0.7, 0, 2) + square(ragged, 0.7, 3, 1)) / 2)
    assert not result.grad_log_probs[[4, 5, 6]].any()


@pytest.mark.parametrize("pairs", ["all", "extremes"])
def test_autograd_finds_the_slopes_of_the_loss(pairs: str, ragged: dict[str, Any], slopes: Any) -> None:
    options = {"pairs": pairs}
    gradient = replay("rebel", ragged, options=options).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("rebel", ragged, options), rtol=1e-5, atol=1e-8)


def test_over_all_pairs_it_is_four_times_gvpo_with_beta_1(ragged: dict[str, Any]) -> None:
    rebel, gvpo = replay("rebel", ragged, options={"eta": 1.0}), replay("gvpo", ragged, options={"beta": 1.0})
    assert rebel.loss == pytest.approx(4 * gvpo.loss)


@pytest.mark.parametrize("pairs", ["all", "extremes"])
def test_it_keeps_the_rules_of_algorithms(pairs: str) -> None:
    check_algorithm("rebel", options={"pairs": pairs})
