"""R-DPO: the margin of lengths by hand, DPO without it, and central differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

PAIR: dict[str, Any] = {
    "group_ids": [0, 0],
    "rewards": [1.0, 0.0],
    "response_mask": [[1, 1, 1], [1, 0, 0]],
    "log_probs": [[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]],
    "ref_log_probs": [[-1.5, -1.0, -1.5], [-1.0, 0.0, 0.0]],
    "rollout_log_probs": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
}
"""Log-ratios 1 and -1, of three tokens and of one."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """beta 0.5, alpha 0.25: margin 0.5 (1 + 1) + 0.25 (3 - 1) = 1.5, log(1 + e^-1.5) = 0.201413; its slope is
    -1/(1 + e^1.5) = -0.182426, times beta in a log-ratio."""
    result = replay("r_dpo", PAIR, options={"beta": 0.5, "alpha": 0.25})
    assert result.loss == pytest.approx(math.log(1 + math.exp(-1.5))) == pytest.approx(0.201413, abs=1e-6)
    slope = 0.5 * 0.182426
    np.testing.assert_allclose(result.grad_log_probs, [[-slope] * 3, [slope, 0, 0]], atol=1e-6)
    assert result.metrics["preference/margin"] == pytest.approx(1.0)


def test_a_longer_chosen_asks_less_of_the_log_ratios() -> None:
    gradients = [
        np.abs(replay("r_dpo", PAIR, options={"alpha": alpha}).grad_log_probs).sum() for alpha in (0.0, 0.1, 1.0)
    ]
    assert gradients[0] > gradients[1] > gradients[2] > 0


def test_autograd_finds_the_slopes_of_the_loss(ragged: dict[str, Any], slopes: Any) -> None:
    gradient = replay("r_dpo", ragged).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("r_dpo", ragged), rtol=1e-5, atol=1e-9)


def test_without_alpha_it_is_dpo_and_it_keeps_the_rules(ragged: dict[str, Any]) -> None:
    mine, dpo = replay("r_dpo", ragged, options={"alpha": 0.0}), replay("dpo", ragged)
    assert mine.loss == pytest.approx(dpo.loss)
    np.testing.assert_allclose(mine.grad_log_probs, dpo.grad_log_probs)
    check_algorithm("r_dpo")
