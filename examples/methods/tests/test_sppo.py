"""SPPO: win rates and loss against calculations by hand, and central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.errors import PluginError
from mmrl.testing import check_algorithm, replay

THREE: dict[str, Any] = {
    "group_ids": [5, 5, 5],
    "rewards": [1.0, 0.0, 1.0],
    "response_mask": [[1, 1], [1, 0], [1, 1]],
    "log_probs": [[-1.0, -1.0], [-2.0, 0.0], [-1.5, -0.5]],
    "old_log_probs": [[-1.0, -1.5], [-2.0, 0.0], [-1.5, -0.5]],
    "ref_log_probs": [[-1.5, -1.5], [-1.0, 0.0], [-1.5, -0.5]],
    "rollout_log_probs": [[-1.0, -1.0], [-2.0, 0.0], [-1.5, -0.5]],
}
"""Log-ratios to the reference 1, -1 and 0; to the policy before the step 1/2, 0 and 0."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """compare: win rates (1/2 + 1 + 1/2)/3 = 2/3, (0 + 1/2 + 0)/3 = 1/6 and 2/3. eta 3: targets 1/2, -1 and 1/2.
    Residuals 1/2, 0 and -1/2, so (1/4 + 0 + 1/4)/3; the slope in a log-ratio is 2 residual / 3."""
    result = replay("sppo", THREE, options={"eta": 3.0, "win_rate": "compare"})
    np.testing.assert_allclose(result.advantages, [1 / 6, -1 / 3, 1 / 6], atol=1e-12)
    assert result.loss == pytest.approx(1 / 6)
    expected = np.array([1.0, 0.0, -1.0]) / 3
    np.testing.assert_allclose(result.grad_log_probs, np.stack([expected] * 2, 1), atol=1e-6)


def test_the_iteration_before_may_be_the_step_before() -> None:
    """Log-ratios 1/2, 0, 0 and targets 1/2, -1, 1/2: residuals 0, 1 and -1/2, so 5/12."""
    result = replay("sppo", THREE, options={"eta": 3.0, "win_rate": "compare", "against": "old"})
    assert result.loss == pytest.approx(5 / 12)


def test_scores_win_by_the_logistic_function_of_their_difference() -> None:
    """1/(1 + e^-1) = 0.731059: (1/2 + 0.731059 + 1/2)/3 and (0.268941 + 1/2 + 0.268941)/3."""
    result = replay("sppo", THREE)
    np.testing.assert_allclose(result.advantages, [0.077020, -0.154039, 0.077020], atol=1e-6)


def test_extremes_are_the_first_best_and_the_worst_with_the_win_rates_of_all() -> None:
    result = replay("sppo", THREE, options={"eta": 3.0, "win_rate": "compare", "completions": "extremes"})
    assert result.loss == pytest.approx((1 / 4 + 0) / 2)
    assert not result.grad_log_probs[2].any()


def test_a_reward_may_be_the_win_rate_and_is_then_between_0_and_1() -> None:
    result = replay("sppo", THREE, options={"win_rate": "given"})
    np.testing.assert_allclose(result.advantages, [0.5, -0.5, 0.5])
    with pytest.raises(PluginError, match=r"a reward of 1\.5 is no win rate.*set win_rate"):
        replay("sppo", {**THREE, "rewards": [1.5, 0.0, 1.0]}, options={"win_rate": "given"})


def test_autograd_finds_the_slopes_of_the_loss(ragged: dict[str, Any], slopes: Any) -> None:
    options = {"eta": 2.0}
    gradient = replay("sppo", ragged, options=options).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("sppo", ragged, options), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"against": "old", "win_rate": "compare", "completions": "extremes"}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, str]) -> None:
    check_algorithm("sppo", options=options)
