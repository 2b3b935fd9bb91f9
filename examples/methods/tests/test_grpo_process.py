"""GRPO with process supervision against a calculation by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, replay
from mmrl_methods.grpo_process import GRPOProcess

TOKENS = np.full((2, 4), -1.0)
BATCH: dict[str, Any] = {
    "group_ids": [0, 0],
    "components": {"process": [0.2, 0.5], "exact": [1.0, 0.0]},
    "weights": {"process": 1.0, "exact": 2.0},
    "response_mask": [[1, 1, 1, 1], [1, 0, 1, 0]],
    "token_rewards": [[0.0, 0.2, 0.0, 0.8], [0.5, 7.0, 0.5, 0.0]],
    **dict.fromkeys(("old_log_probs", "log_probs", "rollout_log_probs"), TOKENS),
}


def test_advantages_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """Steps 0.2, 0.8, 0.5 and 0.5 (7 is outside the mask): mean 1/2, deviation sqrt(0.06), so -z, z, 0, 0.

    The first two tokens of row 0 have -z + z = 0, the others z; the slopes are -A over row and rows.
    """
    z = 0.3 / np.sqrt(0.06)
    found = replay("grpo_process", BATCH)
    np.testing.assert_allclose(found.advantages, [[0, 0, z, z], [0, 0, 0, 0]], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.grad_log_probs[0], np.array([0, 0, -z, -z]) / 8, rtol=1e-5, atol=1e-9)
    assert found.metrics["reward/steps_mean"] == 2.0


def test_an_outcome_is_one_step_more_at_the_end() -> None:
    """Its weight is 2: row 0 ends with 0.8 + 2. Row 1's is 0, so no step beside 0.5."""
    steps = np.array([0.2, 2.8, 0.5, 0.5])
    z = (steps - steps.mean()) / steps.std(ddof=1)
    found = replay("grpo_process", BATCH, options={"outcome": ["exact"]})
    expected = [[z[0] + z[1]] * 2 + [z[1]] * 2, [z[2] + z[3], 0, z[3], 0]]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-5, atol=1e-9)


def test_an_outcome_that_is_no_reward_is_refused() -> None:
    facts = RunFacts(8, 1, 8, 1, rewards=("process",), accuracy="process")
    with pytest.raises(ValueError, match="outcome names exact, and the rewards are process"):
        GRPOProcess(GRPOProcess.Config(outcome=("exact",))).check(facts)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("grpo_process")
    check_algorithm("grpo_process", options={"outcome": ["exact"]}, rewards=("process", "exact"))
