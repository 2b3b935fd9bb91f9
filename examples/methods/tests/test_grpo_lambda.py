"""GRPO-lambda: which prompts are rewarded for length, and their advantages, against a calculation by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay
from mmrl_methods.grpo_lambda import relative_lengths

LENGTHS = [1, 3, 2, 4, 4, 1, 2, 2]


@pytest.fixture
def batch() -> dict[str, Any]:
    """Two prompts of four: three of the first are right, of 1, 3 and 2 tokens, and one of the second."""
    mask = np.arange(4) < np.array(LENGTHS)[:, None]
    zeros = np.zeros(mask.shape)
    return {
        "group_ids": [6, 6, 6, 6, 2, 2, 2, 2],
        "rewards": [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        "response_mask": mask,
        "log_probs": zeros,
        "rollout_log_probs": zeros,
    }


def relative(rewards: list[float]) -> Any:
    values = np.array(rewards)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def test_prompts_that_are_mostly_right_are_rewarded_for_short_completions(batch: dict[str, Any]) -> None:
    """The right ones have 1, 3 and 2 tokens: mean 2, deviation sqrt(2/3), so -1.224745, 1.224745 and 0, whose logistic
    function is 0.227103, 0.772897 and 1/2; alpha 0.4 leaves 0.909159, 0.690841 and 0.8."""
    result = replay("grpo_lambda", batch, options={"share": 0.5, "alpha": 0.4})
    np.testing.assert_allclose(result.advantages[:4], relative([0.909159, 0.690841, 0.8, 0.0]), atol=1e-5)
    np.testing.assert_allclose(result.advantages[4:], relative([1.0, 0.0, 0.0, 0.0]), atol=1e-6)
    assert result.metrics["grpo_lambda/penalised_prompts"] == 1


def test_the_share_decides_and_nothing_is_penalised_without_one(batch: dict[str, Any]) -> None:
    plain = replay("grpo", batch)
    for share in (0.0, 0.49):
        found = replay("grpo_lambda", batch, options={"share": share})
        np.testing.assert_allclose(found.advantages, plain.advantages)
        np.testing.assert_allclose(found.grad_log_probs, plain.grad_log_probs)
    assert replay("grpo_lambda", batch, options={"share": 1.0}).metrics["grpo_lambda/penalised_prompts"] == 2


def test_prompts_as_right_as_the_last_count_and_those_never_right_do_not(batch: dict[str, Any]) -> None:
    tied = {**batch, "rewards": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]}
    assert replay("grpo_lambda", tied, options={"share": 0.5}).metrics["grpo_lambda/penalised_prompts"] == 2
    wrong = {**batch, "rewards": [0.0] * 8}
    assert replay("grpo_lambda", wrong, options={"share": 1.0}).metrics["grpo_lambda/penalised_prompts"] == 0


def test_equally_long_completions_are_penalised_alike() -> None:
    np.testing.assert_array_equal(relative_lengths(np.array([7.0, 7.0, 7.0])), 0.5)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("grpo_lambda", options={"share": 0.6})
