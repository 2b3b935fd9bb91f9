"""RRHF against loops over pairs in plain numpy, a calculation by hand, and central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

THREE: dict[str, Any] = {
    "group_ids": [5, 5, 5],
    "rewards": [2.0, 1.0, 0.0],
    "response_mask": [[1, 1], [1, 0], [1, 1]],
    "log_probs": [[-1.0, -3.0], [-1.5, 0.0], [-1.0, -0.5]],
    "rollout_log_probs": [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
}
"""Mean log-probs -2, -1.5 and -0.75, against the order of the scores."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """Pairs in the wrong order: 0.5 (second over first), 1.25 (third over first), 0.75 (third over second): 2.5. The
    best has -(-4) = 4. Slopes of the means: -2, 1 - 1 = 0 and 2; by 2, 1 and 2 tokens, and -1 for the best's."""
    result = replay("rrhf", THREE)
    assert result.loss == pytest.approx(6.5)
    assert result.metrics["loss/rank"] == pytest.approx(2.5) and result.metrics["loss/nll"] == pytest.approx(4.0)
    np.testing.assert_allclose(result.grad_log_probs, [[-2, -2], [0, 0], [1, 1]], atol=1e-12)
    assert result.metrics["rrhf/misranked"] == pytest.approx(3 / 3)


def test_the_authors_code_is_within_the_options() -> None:
    """100 times the ranking, and the mean negative log-prob of the best."""
    result = replay("rrhf", THREE, options={"rank_weight": 100.0, "nll": "mean"})
    assert result.loss == pytest.approx(252.0)


def test_sums_over_groups_are_those_of_a_loop(ragged: dict[str, Any]) -> None:
    mask = np.array(ragged["response_mask"])
    sums = np.where(mask, ragged["log_probs"], 0.0).sum(1)
    scores, rewards, losses = sums / mask.sum(1) ** 0.5, ragged["rewards"], []
    for rows in ([0, 2, 4], [1, 3]):
        rank = sum(max(0.0, scores[i] - scores[j]) for i in rows for j in rows if rewards[i] < rewards[j])
        losses.append(3.0 * rank - sums[max(rows, key=lambda row: rewards[row])])
    result = replay("rrhf", ragged, options={"rank_weight": 3.0, "length_penalty": 0.5})
    assert result.loss == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5)


def test_a_prompt_without_an_order_leaves_the_loss() -> None:
    result = replay("rrhf", {**THREE, "rewards": [1.0, 1.0, 1.0]})
    assert result.loss == 0 and not result.sequence_weights.any()


def test_autograd_finds_the_slopes_of_the_loss(ragged: dict[str, Any], slopes: Any) -> None:
    gradient = replay("rrhf", ragged).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("rrhf", ragged), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"nll": "mean", "data": "sampled"}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, str]) -> None:
    check_algorithm("rrhf", options=options)
