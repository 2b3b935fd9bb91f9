"""LUFFY: loss and gradient of sampled tokens and of a demonstration's, against calculations by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay
from mmrl_methods.luffy import LUFFY

OLD = np.array([[-1.0, -2.0], np.log([0.1, 0.9])])
GROUP: dict[str, Any] = {
    "group_ids": [3, 3],
    "rewards": [0.0, 1.0],
    "response_mask": [[1, 1], [1, 1]],
    "log_probs": OLD,
    "old_log_probs": OLD,
    "rollout_log_probs": [[-1.0, -2.0], [0.0, 0.0]],
    "given": [False, True],
}
"""A wrong completion and the right demonstration, whose tokens have probability 0.1 and 0.9; advantages -1/2, 1/2."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """p/(p + 0.1) is 1/2 and 0.9; its slope in log p is 0.1 p/(p + 0.1)^2, 1/4 and 0.09. The other ratios are 1."""
    result = replay("luffy", GROUP)
    assert result.loss == pytest.approx((0.5 + 0.5 - 0.25 - 0.45) / 4)
    np.testing.assert_allclose(result.grad_log_probs, np.array([[0.5, 0.5], [-0.125, -0.045]]) / 4, rtol=1e-6)
    assert result.metrics["luffy/given_probability"] == pytest.approx(1.0 / 4)


def test_the_clip_is_for_sampled_tokens_alone() -> None:
    """The wrong completion's first token has the ratio 1/2, below 0.8, and so no gradient."""
    moved = {**GROUP, "log_probs": OLD - np.array([[np.log(2), 0.0], [np.log(2), 0.0]])}
    result = replay("luffy", moved)
    assert result.grad_log_probs[0, 0] == 0 and result.grad_log_probs[1, 0] != 0
    assert result.metrics["policy/clip_fraction_low"] == pytest.approx(1 / 4)


def test_the_deviation_of_the_group_may_divide_advantages() -> None:
    assert replay("luffy", GROUP, options={"scale": "group"}).advantages[1] == pytest.approx(
        0.5 / np.sqrt(0.5), rel=1e-5
    )


def test_autograd_finds_the_slopes_of_the_loss(slopes: Any) -> None:
    gradient = replay("luffy", GROUP).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("luffy", GROUP), rtol=1e-6, atol=1e-10)


def test_it_asks_for_demonstrations_and_keeps_the_rules_of_algorithms() -> None:
    assert LUFFY(LUFFY.Config()).needs().demonstration
    check_algorithm("luffy")
    check_algorithm("luffy", options={"scale": "group", "gamma": 0.5})
