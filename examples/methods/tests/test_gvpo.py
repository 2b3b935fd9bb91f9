"""GVPO against a calculation by hand, the paper's weighted likelihood, and central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

PAIR: dict[str, Any] = {
    "group_ids": [0, 0],
    "rewards": [1.0, 0.0],
    "response_mask": [[1, 1], [1, 0]],
    "old_log_probs": [[-1.0, -1.0], [-2.0, 0.0]],
    "log_probs": [[-0.5, -0.5], [-3.0, 0.0]],
    "ref_log_probs": [[-1.0, -2.0], [-3.0, 0.0]],
    "rollout_log_probs": [[-1.0, -1.0], [-2.0, 0.0]],
}
"""Log-ratios 1 and -1 to the policy before the step, 2 and 0 to the reference; centred rewards 1/2 and -1/2."""


def test_loss_and_gradient_of_a_pair_are_those_of_a_calculation_by_hand() -> None:
    """beta 0.2: residuals 0.2 - 0.5 = -0.3 and 0.3, so 1/(2 (2 - 1)) (0.09 + 0.09) = 0.09.

    Each residual r has the slope beta r / (k - 1): the terms of the mean add up to 0. So -0.06 for each token of the
    first completion and 0.06 for that of the second.
    """
    result = replay("gvpo", PAIR, options={"beta": 0.2})
    assert result.loss == pytest.approx(0.09)
    np.testing.assert_allclose(result.grad_log_probs, [[-0.06, -0.06], [0.06, 0.0]], atol=1e-12)
    assert result.metrics["regression/residual_abs"] == pytest.approx(0.3)
    assert result.metrics["regression/log_ratio"] == pytest.approx(0.0)


def test_the_reference_may_be_the_policy_that_log_ratios_are_taken_from() -> None:
    """They are 2 and 0, so 1 and -1 within the group as before, and so is the loss; their mean is 1."""
    result = replay("gvpo", PAIR, options={"beta": 0.2, "against": "reference"})
    assert result.loss == pytest.approx(0.09)
    assert result.metrics["regression/log_ratio"] == pytest.approx(1.0)


def test_the_gradient_is_the_papers_weighted_likelihood(ragged: dict[str, Any]) -> None:
    """-beta/(k - 1) (A_i - beta (x_i - mean(x))) for each token, over the five rows of groups 4 and 9 that count."""
    beta, mask = 0.3, np.array(ragged["response_mask"])
    result = replay("gvpo", ragged, options={"beta": beta})
    ratios = np.where(mask, ragged["log_probs"] - ragged["old_log_probs"], 0.0).sum(1)
    expected, sequences = np.zeros(mask.shape), 5
    for rows in ([0, 2, 4], [1, 3]):
        k = len(rows)
        centred = ragged["rewards"][rows] - ragged["rewards"][rows].mean()
        weights = centred - beta * (ratios[rows] - ratios[rows].mean())
        expected[rows] = -beta * k / (k - 1) / sequences * weights[:, None]
    np.testing.assert_allclose(result.grad_log_probs, expected * mask, rtol=1e-6, atol=1e-12)


def test_autograd_finds_the_slopes_of_the_loss(ragged: dict[str, Any], slopes: Any) -> None:
    result = replay("gvpo", ragged)
    np.testing.assert_allclose(result.grad_log_probs, slopes("gvpo", ragged), rtol=1e-5, atol=1e-9)


def test_the_loss_is_0_at_the_solution_of_the_penalised_reward(ragged: dict[str, Any]) -> None:
    """beta x_i = R_i + a constant of the prompt."""
    mask, beta = np.array(ragged["response_mask"]), 0.5
    lengths = mask.sum(1, keepdims=True)
    target = (ragged["rewards"] + np.where(ragged["group_ids"] == 4, 0.7, -2.0)) / beta
    solved = {**ragged, "log_probs": ragged["old_log_probs"] + target[:, None] / lengths}
    result = replay("gvpo", solved, options={"beta": beta})
    assert result.loss == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(result.grad_log_probs, 0.0, atol=1e-9)


@pytest.mark.parametrize("against", ["old", "reference"])
def test_it_keeps_the_rules_of_algorithms(against: str) -> None:
    check_algorithm("gvpo", options={"against": against})
