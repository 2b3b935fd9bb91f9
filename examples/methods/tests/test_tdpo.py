"""TDPO: losses and gradients of both variants by hand, and that its estimators find a known divergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay

X_CHOSEN, X_REJECTED = np.array([0.5, -0.2]), np.array([-1.0])
"""Log-ratios of tokens."""


VALUES = {"given": lambda x: np.exp(x) - 1 - x, "sampled": lambda x: 1 - np.exp(-x) - x * np.exp(-x)}
"""A token's estimate of the divergence."""
SLOPES = {"given": lambda x: np.exp(x) - 1, "sampled": lambda x: 1 - np.exp(-x)}
"""Its gradient by the token's log-prob, so that the mean is the divergence's."""


def pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    reference = np.full((2, 2), -2.0)
    ratios = np.array([chosen, [*rejected, 0.0]])
    tokens = {"response_mask": [[1, 1], [1, 0]], "ref_log_probs": reference, "rollout_log_probs": reference}
    return {"group_ids": [0, 0], "rewards": [1.0, 0.0], "log_probs": reference + ratios, **tokens}


@pytest.mark.parametrize("data", ["given", "sampled"])
@pytest.mark.parametrize("variant", ["tdpo1", "tdpo2"])
def test_loss_and_gradient_are_those_of_the_equation(variant: str, data: str) -> None:
    """With beta 0.1 and alpha 0.5; the gradient by the chain rule, with the divergence's own."""
    result = replay("tdpo", pair(X_CHOSEN, X_REJECTED), options={"variant": variant, "data": data})
    of_chosen, of_rejected = (VALUES[data](x).sum() for x in (X_CHOSEN, X_REJECTED))
    alpha = 0.5 if variant == "tdpo2" else 1.0
    margin = X_CHOSEN.sum() - X_REJECTED.sum() - alpha * (of_rejected - of_chosen)
    assert result.loss == pytest.approx(math.log(1 + math.exp(-0.1 * margin)))
    outer = -0.1 / (1 + math.exp(0.1 * margin))
    through_chosen = 0.0 if variant == "tdpo2" else SLOPES[data](X_CHOSEN)
    np.testing.assert_allclose(result.grad_log_probs[0], outer * (1 + through_chosen), rtol=1e-5)
    np.testing.assert_allclose(result.grad_log_probs[1, :1], outer * (-1 - alpha * SLOPES[data](X_REJECTED)), rtol=1e-5)


def test_the_estimators_find_the_divergence_of_two_distributions() -> None:
    """Over a vocabulary of three, as sums over its tokens by their probability."""
    policy, reference = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
    x, divergence = np.log(policy / reference), float((reference * np.log(reference / policy)).sum())
    assert (reference * VALUES["given"](x)).sum() == pytest.approx(divergence)
    assert (policy * VALUES["sampled"](x)).sum() == pytest.approx(divergence)
    # The divergence's gradient by the logits is policy - reference.
    for data, weights in (("given", reference), ("sampled", policy)):
        by_logprob = weights * SLOPES[data](x)
        np.testing.assert_allclose(by_logprob - policy * by_logprob.sum(), policy - reference, atol=1e-12)
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
