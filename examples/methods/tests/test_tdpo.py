"""TDPO: losses and gradients of both variants by hand, and that its estimators find a known divergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

X_CHOSEN, X_REJECTED = np.array([0.5, -0.2]), np.array([-1.0])
"""Log-ratios of tokens."""


def pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    reference = np.full((2, 2), -2.0)
    ratios = np.array([chosen, [*rejected, 0.0]])
    tokens = {"response_mask": [[1, 1], [1, 0]], "ref_log_probs": reference, "rollout_log_probs": reference}
    return {"group_ids": [0, 0], "rewards": [1.0, 0.0], "log_probs": reference + ratios, **tokens}


def loss_of(chosen: Any, rejected: Any, variant: str, data: str, stopped: float | None = None) -> float:
    """The paper's loss with beta 0.1 and alpha 0.5, of log-ratios; ``stopped`` is the chosen's divergence if it has no
    gradient."""

    def divergence(x: Any) -> float:
        return float((np.exp(x) - 1 - x if data == "given" else 1 - np.exp(-x) - x * np.exp(-x)).sum())

    chosen_kl = divergence(chosen) if stopped is None else stopped
    alpha = 0.5 if variant == "tdpo2" else 1.0
    margin = chosen.sum() - rejected.sum() - alpha * (divergence(rejected) - chosen_kl)
    return math.log(1 + math.exp(-0.1 * margin))


@pytest.mark.parametrize("data", ["given", "sampled"])
@pytest.mark.parametrize("variant", ["tdpo1", "tdpo2"])
def test_loss_and_gradient_are_those_of_the_equation(variant: str, data: str) -> None:
    result = replay("tdpo", pair(X_CHOSEN, X_REJECTED), options={"variant": variant, "data": data})
    assert result.loss == pytest.approx(loss_of(X_CHOSEN, X_REJECTED, variant, data))
    kl = np.exp(X_CHOSEN) - 1 - X_CHOSEN if data == "given" else 1 - np.exp(-X_CHOSEN) - X_CHOSEN * np.exp(-X_CHOSEN)
    stopped = float(kl.sum()) if variant == "tdpo2" else None
    for row, place in ((0, 0), (0, 1), (1, 0)):
        values = []
        for step in (1e-6, -1e-6):
            moved = [X_CHOSEN.copy(), X_REJECTED.copy()]
            moved[row][place] += step
            values.append(loss_of(moved[0], moved[1], variant, data, stopped))
        assert result.grad_log_probs[row, place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


def test_the_estimators_find_the_divergence_of_two_distributions() -> None:
    """Over a vocabulary of three, as sums over its tokens by their probability."""
    policy, reference = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
    x, divergence = np.log(policy / reference), float((reference * np.log(reference / policy)).sum())
    assert (reference * (np.exp(x) - 1 - x)).sum() == pytest.approx(divergence)
    assert (policy * (1 - np.exp(-x) - x * np.exp(-x))).sum() == pytest.approx(divergence)
    # What the plugin makes of one token of each, weighed in the same way: its reward less beta times the log-ratio.
    for data, weights in (("given", reference), ("sampled", policy)):
        rewards = [_reward(float(each), data) for each in x]
        assert (weights * (np.array(rewards) - 0.1 * x)).sum() == pytest.approx(0.1 * divergence)


def _reward(x: float, data: str) -> float:
    batch = pair([x, 0.0], [-1.0])
    batch["response_mask"] = [[1, 0], [1, 0]]
    return replay("tdpo", batch, options={"data": data}).metrics["preference/reward_chosen"]


@pytest.mark.parametrize("options", [{}, {"variant": "tdpo1", "data": "sampled"}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, str]) -> None:
    check_algorithm("tdpo", options=options)
