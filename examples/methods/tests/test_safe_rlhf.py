"""Safe RLHF against calculations by hand: advantages, gradient, and the steps of the multiplier."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, replay
from mmrl_methods.safe_rlhf import SafeRLHF

OFF: dict[str, Any] = {"kl": {"coef": 0.0}}
BATCH: dict[str, Any] = {
    "group_ids": [0, 0, 0, 0],
    "components": {"reward": [1.0, 1.0, 0.0, 0.0], "cost": [1.0, -1.0, 1.0, -1.0]},
    "weights": {"reward": 1.0, "cost": 0.0},
    "response_mask": [[1, 1], [1, 0], [1, 1], [1, 1]],
    "old_log_probs": [[-1.0, -1.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]],
    "log_probs": [[-1.0, -1.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]],
    "rollout_log_probs": [[-1.0, -1.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]],
}


def test_advantages_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    """lambda 3: (R - 3 C) / 4 is -1/2, 1, -3/4 and 3/4, whose mean is 1/8. At a ratio of 1 the slope of a token is -A,
    and there are seven tokens."""
    result = replay("safe_rlhf", BATCH, options={**OFF, "lambda_init": 3.0})
    np.testing.assert_allclose(result.advantages, [-0.625, 0.875, -0.875, 0.625])
    expected = -np.array([-0.625, 0.875, -0.875, 0.625])[:, None] / 7 * np.array(BATCH["response_mask"])
    np.testing.assert_allclose(result.grad_log_probs, expected, atol=1e-12)
    assert result.metrics["safe_rlhf/lambda"] == pytest.approx(3.0)
    assert result.metrics["safe_rlhf/cost_mean"] == 0.0


def test_a_weight_of_the_cost_is_taken_out_of_the_sum() -> None:
    weighed = {**BATCH, "weights": {"reward": 1.0, "cost": -0.5}}
    expected = replay("safe_rlhf", BATCH, options=OFF)
    np.testing.assert_allclose(replay("safe_rlhf", weighed, options=OFF).advantages, expected.advantages)


def test_advantages_are_those_of_reward_and_cost_apart() -> None:
    """(A_R - lambda A_C) / (1 + lambda) with each less its group's mean, on batches of any numbers."""
    rng = np.random.default_rng(3)
    rewards, costs, ids = rng.normal(size=12), rng.normal(size=12), np.repeat([5, 2, 9], 4)
    tokens = np.full((12, 1), -1.0)
    names = ("old_log_probs", "log_probs", "rollout_log_probs")
    batch = {"group_ids": ids, "components": {"r": rewards, "cost": costs}, "weights": {"r": 1.0, "cost": 0.0}}
    batch |= {"response_mask": np.ones((12, 1))} | dict.fromkeys(names, tokens)

    def less_mean(values: Any) -> Any:
        return values - np.repeat([values[ids == each].mean() for each in (5, 2, 9)], 4)

    result = replay("safe_rlhf", batch, options={**OFF, "lambda_init": 0.7})
    np.testing.assert_allclose(result.advantages, (less_mean(rewards) - 0.7 * less_mean(costs)) / 1.7, atol=1e-12)


def test_the_penalty_for_leaving_the_reference_does_not_depend_on_lambda() -> None:
    """The reference is one nat below on each token: beta 0.1 takes 0.2 off three rows and 0.1 off the other."""
    batch = {**BATCH, "ref_log_probs": np.array(BATCH["old_log_probs"]) - 1.0}
    for multiplier in (0.5, 4.0):
        options = {"lambda_init": multiplier, "kl": {"coef": 0.1}}
        free = replay("safe_rlhf", BATCH, options={**options, **OFF})
        change = replay("safe_rlhf", batch, options=options).advantages - free.advantages
        np.testing.assert_allclose(change, [-0.025, 0.075, -0.025, -0.025], atol=1e-12)


def stepped(costs: list[list[float]], **options: Any) -> tuple[SafeRLHF, list[float]]:
    """The algorithm after steps with these costs, and the multiplier of each step."""
    algorithm, used = SafeRLHF(SafeRLHF.Config.model_validate(OFF | options)), []
    for each in costs:
        rows = {**BATCH, "components": {"reward": [1.0, 0.0, 1.0, 0.0], "cost": each}}
        used.append(replay(algorithm, rows).metrics["safe_rlhf/lambda"])
    return algorithm, used


def test_the_multiplier_moves_by_the_mean_cost_above_the_threshold() -> None:
    """From lambda 1 at a rate of 0.5 and a threshold of 0.5.

    The costs' means over the newest four are 1 and 0. First 0.5 * 1 * 0.5 = 0.25, so exp(0.25); then 0.5 exp(0.25)
    times -0.5 of it.
    """
    first = math.exp(0.25)
    second = math.exp(0.25 - 0.25 * first)
    _, used = stepped([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], lambda_lr=0.5, threshold=0.5, window=4)
    assert used == pytest.approx([1.0, first, second])


def test_the_window_holds_the_newest_costs_and_lambda_has_a_limit() -> None:
    """Six costs: two of the first step, of mean 1, and four of 0 make 1/3."""
    _, used = stepped([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], lambda_lr=0.3, window=6)
    assert used == pytest.approx([1.0, math.exp(0.3), math.exp(0.3 + 0.1 * math.exp(0.3))])
    _, used = stepped([[9, 9, 9, 9]] * 3, lambda_lr=1.0, lambda_max=2.0)
    assert used == pytest.approx([1.0, 2.0, 2.0])
    _, used = stepped([[9, 9, 9, 9]] * 3, lambda_lr=0.1, delay_steps=1)
    assert used == pytest.approx([1.0, 1.0, math.exp(0.9)])


def test_a_run_that_goes_on_has_the_same_multipliers() -> None:
    costs: list[list[float]] = [[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    _, whole = stepped(costs, window=6, threshold=0.2)
    first, _ = stepped(costs[:2], window=6, threshold=0.2)
    second = SafeRLHF(first.config)
    second.restore(json.loads(json.dumps(first.state())))
    for cost, expected in zip(costs[2:], whole[2:], strict=True):
        rows = {**BATCH, "components": {"reward": [1.0, 0.0, 1.0, 0.0], "cost": cost}}
        assert replay(second, rows).metrics["safe_rlhf/lambda"] == expected


def test_a_run_without_the_cost_is_refused() -> None:
    algorithm = SafeRLHF(SafeRLHF.Config())
    facts = RunFacts(8, 1, 8, 1, rewards=("exact", "harm"), accuracy="exact")
    with pytest.raises(ValueError, match="cost is 'cost', and the rewards are exact, harm"):
        algorithm.check(facts)
    with pytest.raises(ValueError, match="the accuracy too"):
        SafeRLHF(SafeRLHF.Config(cost="exact")).check(facts)
    assert SafeRLHF(SafeRLHF.Config(cost="harm")).check(facts) == ()
    with pytest.raises(ConfigError, match="reward_norm and reward_clip"):
        check_algorithm("safe_rlhf", options={"reward_norm": "group"})
    with pytest.raises(ConfigError, match="above lambda_max"):
        check_algorithm("safe_rlhf", options={"lambda_init": 9.0})


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("safe_rlhf")
    check_algorithm("safe_rlhf", options={"cost": "cost", "window": 3, **OFF}, rewards=("reward", "cost"))
