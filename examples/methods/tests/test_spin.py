"""SPIN: loss and gradient against calculations by hand, and which rows are learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import Needs
from mmrl.testing import check_algorithm, replay
from mmrl_methods.spin import SPIN

GROUP: dict[str, Any] = {
    "group_ids": [3, 3, 3],
    "rewards": [0.0, 0.0, 0.0],
    "response_mask": [[1, 1], [1, 1], [1, 0]],
    "log_probs": [[-1.0, -1.0], [-1.0, -2.0], [-1.5, 0.0]],
    "ref_log_probs": [[-1.0, -1.0], [-2.0, -3.0], [-2.5, 0.0]],
    "rollout_log_probs": [[-1.0, -1.0], [-1.0, -2.0], [0.0, 0.0]],
    "given": [False, False, True],
}
"""Two sampled completions with log-ratios 0 and 2, and the demonstration with 1."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """beta 1: margins 1 and -1, losses log(1 + 1/e) and log(1 + e). Slopes in the margins are -0.268941 and -0.731059;
    by two completions, and the demonstration has both."""
    result = replay("spin", GROUP, options={"beta": 1.0})
    assert result.loss == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.e)) / 2)
    np.testing.assert_allclose(result.grad_log_probs, [[0.134471] * 2, [0.365529] * 2, [-0.5, 0.0]], atol=1e-6)
    assert result.metrics["preference/margin"] == 0 and result.metrics["preference/accuracy"] == 0.5


def test_the_hinge_asks_for_a_margin_of_1() -> None:
    """Margins 1 and -1 cost 0 and 2."""
    assert replay("spin", GROUP, options={"beta": 1.0, "variant": "hinge"}).loss == pytest.approx(1.0)


def test_with_one_completion_it_is_dpo_of_the_demonstration_and_that() -> None:
    pair = {key: value[1:] for key, value in GROUP.items()}
    dpo = replay("dpo", {**pair, "rewards": [0.0, 1.0]})
    spin = replay("spin", pair)
    assert spin.loss == pytest.approx(dpo.loss)
    np.testing.assert_allclose(spin.grad_log_probs, dpo.grad_log_probs)


def test_autograd_finds_the_slopes_of_the_loss(slopes: Any) -> None:
    gradient = replay("spin", GROUP).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("spin", GROUP), rtol=1e-6, atol=1e-10)


def test_a_prompt_without_a_valid_completion_leaves_the_loss() -> None:
    result = replay("spin", {**GROUP, "reward_valid": [False, False, True]})
    assert not result.sequence_weights.any() and result.loss == 0


def test_it_asks_for_demonstrations_and_keeps_the_rules_of_algorithms() -> None:
    needs = Needs(reference_logprobs=True, rewards=False, whole_groups=True, demonstration=True)
    assert SPIN(SPIN.Config()).needs() == needs
    check_algorithm("spin")
    check_algorithm("spin", options={"variant": "hinge"})
