"""Fine-grained PPO against a calculation by hand: advantages, returns, gradients of policy and critic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, replay
from mmrl_methods.fine_grained_ppo import FineGrainedPPO

TOKENS = np.full((2, 3), -1.0)
BATCH: dict[str, Any] = {
    "group_ids": [0, 1],
    "components": {"fine_grained": [0.3, -0.3], "complete": [1.0, 0.5]},
    "weights": {"fine_grained": 1.0, "complete": 0.4},
    "response_mask": [[1, 1, 1], [1, 1, 0]],
    "token_rewards": [[0.3, 0.0, 0.0], [0.0, -0.3, 0.0]],
    "values": [[0.1, 0.2, 0.0], [0.0, -0.1, 0.0]],
    "vpreds": [[0.1, 0.2, 0.0], [0.0, -0.1, 0.0]],
    **dict.fromkeys(("old_log_probs", "log_probs", "rollout_log_probs", "ref_log_probs"), TOKENS),
}
OFF: dict[str, Any] = {"kl": {"coef": 0.0}}


def test_returns_and_advantages_are_those_of_a_calculation_by_hand() -> None:
    """lam 1/2, with the outcome 0.4 at the end of row 0 and 0.2 of row 1.

    Row 0: d = 0.3 + 0.2 - 0.1, 0 + 0 - 0.2, 0.4 - 0 = 0.4, -0.2, 0.4, so A = 0.4, 0, 0.4.
    Row 1: d = 0 - 0.1 - 0, -0.3 + 0.2 + 0.1 = -0.1, 0, so A = -0.1, 0. Returns are A + V.
    """
    found = replay("fine_grained_ppo", BATCH, options={**OFF, "lam": 0.5, "outcome": ["complete"]})
    np.testing.assert_allclose(found.returns, [[0.5, 0.2, 0.4], [-0.1, -0.1, 0.0]], atol=1e-9)
    raw = np.array([0.4, 0.0, 0.4, -0.1, 0.0])
    white = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found.advantages[[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]], white, rtol=1e-6)
    np.testing.assert_allclose(found.grad_log_probs[0], -white[:3] / 5, rtol=1e-6)
    errors = np.array([[-0.4, 0.0, -0.4], [0.1, 0.0, 0.0]])
    np.testing.assert_allclose(found.grad_values, errors / 5, atol=1e-9)


def test_without_an_outcome_only_parts_have_rewards() -> None:
    """lam 1 is what was earned: 0.3 behind the first token of row 0 alone."""
    found = replay("fine_grained_ppo", BATCH, options={**OFF, "lam": 1.0})
    np.testing.assert_allclose(found.returns, [[0.3, 0.0, 0.0], [-0.3, -0.3, 0.0]], atol=1e-9)


def test_the_kl_is_taken_off_token_by_token() -> None:
    """The reference is one nat below, so each token has 0.1 less, and those before it."""
    given = {**BATCH, "ref_log_probs": TOKENS - 1.0}
    found = replay("fine_grained_ppo", given, options={"kl": {"coef": 0.1}, "lam": 1.0})
    np.testing.assert_allclose(found.returns, [[0.0, -0.2, -0.1], [-0.5, -0.4, 0.0]], atol=1e-9)


def test_an_outcome_that_is_no_reward_is_refused() -> None:
    facts = RunFacts(8, 1, 8, 1, rewards=("fine_grained",), accuracy="fine_grained")
    with pytest.raises(ValueError, match="outcome names complete, and the rewards are fine_grained"):
        FineGrainedPPO(FineGrainedPPO.Config(outcome=("complete",))).check(facts)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("fine_grained_ppo")
