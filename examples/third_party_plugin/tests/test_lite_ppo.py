"""Lite-PPO against numbers computed elsewhere, a calculation by hand, and the rules of algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.testing import check_algorithm, replay
from mmrl_lite_ppo.lite_ppo import LitePPO

# Rewards, groups, validity, and advantages in float64 from the formula, by another program: two groups; interleaved
# groups, one of equal rewards and one of one; an invalid reward and a group without any other valid one.
GOLDEN: dict[str, dict[str, list[float]]] = {
    "two groups": {
        "group_ids": [0, 0, 0, 1, 1, 1],
        "rewards": [1.0, 0.0, 0.5, 0.0, 1.0, 1.0],
        "reward_valid": [1, 1, 1, 1, 1, 1],
        "advantages": [1.01709318647, -1.01709318647, 0.0, -1.35612424863, 0.678062124313, 0.678062124313],
    },
    "interleaved": {
        "group_ids": [8, 13, 18, 8, 13, 13, 18, 18, 13, 3],
        "rewards": [0.7, 0.455, 0.287, 0.7, 1.858, -0.323, 0.548, 0.819, 0.149, -0.573],
        "reward_valid": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "advantages": [
            *(0.0, -0.119430278091, -0.395854589452, 0.0, 1.98164408131),
            *(-1.28453067126, -0.00499186115324, 0.400846450605, -0.577683131959, 0.0),
        ],
    },
    "one invalid": {
        "group_ids": [13, 8, 8, 3, 13, 13, 8, 3, 13, 18],
        "rewards": [0.291, 0.7, 0.7, -0.501, 0.474, -0.059, 0.7, -1.479, 0.089, -0.998],
        "reward_valid": [0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "advantages": [
            *(0.0, 0.0, 0.0, 0.610952052838, 0.382313554536),
            *(-0.28361168915, 0.0, -0.610952052838, -0.0987018653868, 0.0),
        ],
    },
}


def with_tokens(rows: dict[str, list[float]], log_ratio: float = 0.0) -> dict[str, Any]:
    """A batch for ``replay``: two tokens in each row, the policy ``log_ratio`` above the old one."""
    old = np.full((len(rows["rewards"]), 2), -1.0)
    tokens = {"response_mask": np.ones_like(old), "old_log_probs": old, "rollout_log_probs": old}
    return {**rows, **tokens, "log_probs": old + log_ratio}


@pytest.mark.parametrize("case", GOLDEN)
def test_advantages_are_golden(case: str) -> None:
    result = replay("lite_ppo", with_tokens(GOLDEN[case]))
    np.testing.assert_allclose(result.advantages, GOLDEN[case]["advantages"], rtol=1e-6, atol=1e-9)


def test_loss_gradient_and_clip_are_those_of_a_calculation_by_hand() -> None:
    """At a ratio of e, above 1 + clip_high, a good token's loss is -1.28 A with no gradient, a bad one's -A e."""
    rows = GOLDEN["two groups"]
    result = replay("lite_ppo", with_tokens(rows, log_ratio=1.0), options={"clip_high": 0.28})
    advantages = np.array(rows["advantages"])
    good, num_tokens = advantages > 0, 12
    expected = np.where(good, -1.28 * advantages, -np.e * advantages)
    np.testing.assert_allclose(result.loss, 2 * expected.sum() / num_tokens, rtol=1e-6)
    gradient = np.where(good, 0.0, expected) / num_tokens
    np.testing.assert_allclose(result.grad_log_probs, np.stack([gradient] * 2, 1), rtol=1e-6, atol=1e-12)
    assert result.metrics["policy/clip_fraction_high"] == pytest.approx(good.mean())


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("lite_ppo")
    check_algorithm(LitePPO, options={"clip_low": 0.1, "clip_high": 0.3, "std_eps": 1e-4})


def test_a_clip_of_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip_low"):
        check_algorithm("lite_ppo", options={"clip_low": 1.0})
