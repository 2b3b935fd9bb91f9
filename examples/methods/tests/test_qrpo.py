"""QRPO: partition functions by numerical integration, a calculation by hand, and central differences."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay
from mmrl_methods.qrpo import FUNCTIONS, Transform, log_partition

THREE: dict[str, Any] = {
    "group_ids": [5, 5, 5],
    "rewards": [2.0, 7.0, 2.0],
    "response_mask": [[1, 1], [1, 0], [1, 1]],
    "log_probs": [[-1.0, -1.0], [-2.0, 0.0], [-1.5, -0.5]],
    "ref_log_probs": [[-1.5, -1.5], [-1.0, 0.0], [-1.5, -0.5]],
    "rollout_log_probs": [[-1.0, -1.0], [-2.0, 0.0], [-1.5, -0.5]],
}
"""Log-ratios 1, -1 and 0. Of two others one is no higher than the first, both than the second: 1/2, 1, 1/2."""


def test_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """beta 1: log Z = 1 + log(1 - 1/e) = 0.541325. Residuals: 1/2 - 0.541325 - 1 = -1.041325, 1 - 0.541325 + 1 =
    1.458675 and 1/2 - 0.541325 = -0.041325. Squares 1.084358, 2.127733, 0.001708, mean 1.071266. The slope in a
    log-ratio is -2 residual / 3."""
    result = replay("qrpo", THREE, options={"beta": 1.0})
    np.testing.assert_allclose(result.advantages, [-0.041325, 0.458675, -0.041325], atol=1e-6)
    assert result.loss == pytest.approx(1.071266, abs=1e-6)
    expected = [[0.694217, 0.694217], [-0.972450, 0.0], [0.027550, 0.027550]]
    np.testing.assert_allclose(result.grad_log_probs, expected, atol=1e-6)
    assert result.metrics["qrpo/quantile"] == pytest.approx(2 / 3)


def test_quantiles_are_kept_away_from_where_a_transform_is_infinite() -> None:
    """The quantiles 0 and 1 of a pair become 1/2 and 1 for the logarithm, 1/2 and 1/2 for the normal."""
    pair = {key: value[:2] for key, value in THREE.items()}
    log = replay("qrpo", pair, options={"beta": 1.0, "transform": "log"})
    np.testing.assert_allclose(log.advantages, [math.log(0.5) - math.log(0.5), -math.log(0.5)])
    normal = replay("qrpo", pair, options={"beta": 1.0, "transform": "normal"})
    np.testing.assert_allclose(normal.advantages, [-0.5, -0.5])


@pytest.mark.parametrize("transform", FUNCTIONS)
def test_the_partition_function_is_the_mean_of_the_best_policys_weight(transform: Transform) -> None:
    """A sum over the middles of a million parts of (0, 1), with beta 0.7; of the normal, over its density."""
    beta = 0.7
    middles = (np.arange(10**6) + 0.5) / 10**6
    if transform == "normal":
        values = np.linspace(-12, 12, 10**5)
        density = np.array([NormalDist().pdf(0.0)]) * np.exp(-(values**2) / 2)
        mean = float((density * np.exp(values / beta)).sum() * (values[1] - values[0]))
    else:
        mean = float(np.exp((np.log(middles) if transform == "log" else middles) / beta).mean())
    assert log_partition(transform, beta) == pytest.approx(math.log(mean), abs=1e-5)


@pytest.mark.parametrize("beta", [1.1, 30.0, 1000.0])
def test_the_partition_function_is_exact_for_a_large_beta(beta: float) -> None:
    """With u = 1/beta, log Z is u/2 + u^2/24 - u^4/2880 + ..."""
    exact = 0.5 + 1 / (24 * beta) - 1 / (2880 * beta**3)
    assert beta * log_partition("identity", beta) == pytest.approx(exact, rel=3e-5 if beta < 2 else 1e-9)


def test_the_loss_is_0_at_the_best_policy() -> None:
    """beta x_i = q_i - beta log Z."""
    beta, quantiles = 0.5, np.array([0.5, 1.0, 0.5])
    lengths = np.array(THREE["response_mask"]).sum(1)
    ratios = (quantiles - beta * log_partition("identity", beta)) / beta
    solved = {**THREE, "log_probs": np.array(THREE["ref_log_probs"]) + (ratios / lengths)[:, None]}
    assert replay("qrpo", solved, options={"beta": beta}).loss == pytest.approx(0.0, abs=1e-12)


def test_autograd_finds_the_slopes_of_the_loss(ragged: dict[str, Any], slopes: Any) -> None:
    gradient = replay("qrpo", ragged).grad_log_probs
    np.testing.assert_allclose(gradient, slopes("qrpo", ragged), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"transform": "identity", "data": "given"}, {"transform": "normal"}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, str]) -> None:
    check_algorithm("qrpo", options=options)
