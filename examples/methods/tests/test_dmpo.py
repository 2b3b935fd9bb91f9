"""DMPO: weights of turns, loss and gradient against calculations by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, replay
from mmrl.types import ENVIRONMENT
from mmrl_methods.dmpo import DMPO, weights_of

RATIOS = np.array([[0.5, 0.5, -0.2, 0.4], [-1.0, 0.3, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])


@pytest.fixture
def batch() -> dict[str, Any]:
    """The best episode has three turns, of 2, 1 and 1 tokens; the worst has two; one is between, of one turn."""
    reference = np.full(RATIOS.shape, -3.0)
    return {
        "group_ids": [4, 4, 4],
        "rewards": [1.0, 0.0, 0.5],
        "response_mask": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
        "log_probs": reference + RATIOS,
        "ref_log_probs": reference,
        "rollout_log_probs": reference,
        "turns": [[0, 0, 1, 2], [0, 1, 1, 1], [0, 0, 0, 0]],
        "turn_rewards": [[0.0, 0.0, 1.0], [0.0, 0.0], [0.5]],
        "turn_states": [["", "a", "b"], ["", "a"], [""]],
    }


def test_turns_count_less_the_later_they_are() -> None:
    """gamma 1/2 and three turns: 1, 1/2 (1 - 1/4)/(7/8) = 3/7, 1/4 (1/2)/(7/8) = 1/7. In the limit 1, 2/3, 1/3."""
    turns = np.array([0, 0, 1, 2])
    np.testing.assert_allclose(weights_of(turns, 0.5), [1, 1, 3 / 7, 1 / 7])
    np.testing.assert_allclose(weights_of(turns, 1.0), [1, 1, 2 / 3, 1 / 3])
    np.testing.assert_allclose(weights_of(turns, 1 - 1e-7), [1, 1, 2 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_array_equal(weights_of(np.zeros(3, int), 0.7), 1.0)


def test_loss_and_gradient_are_those_of_a_calculation_by_hand(batch: dict[str, Any]) -> None:
    """gamma 1/2: the best has 1 - 3/7 0.2 + 1/7 0.4 = 0.971429. The worst's two turns weigh 1 and 1/2 (1/2)/(3/4), so
    1/3: -1 + 0.1 = -0.9. Margin 1.871429; beta 1: log(1 + e^-1.871429), slope -1/(1 + e^1.871429)."""
    result = replay("dmpo", batch, options={"gamma": 0.5, "beta": 1.0})
    margin = 1 - 0.6 / 7 + 0.4 / 7 + 0.9
    assert result.loss == pytest.approx(math.log(1 + math.exp(-margin)))
    slope = 1 / (1 + math.exp(margin))
    expected = [[-1, -1, -3 / 7, -1 / 7], [1, 1 / 3, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(result.grad_log_probs, slope * np.array(expected), rtol=1e-6, atol=1e-12)
    assert result.metrics["preference/margin"] == pytest.approx(margin)
    assert result.metrics["preference/accuracy"] == 1 and result.metrics["preference/pairs"] == 1


def test_with_single_turns_it_is_dpo(batch: dict[str, Any]) -> None:
    single = {**batch, "turns": np.zeros((3, 4), int)}
    single |= {"turn_rewards": [[1.0], [0.0], [0.5]], "turn_states": [[""]] * 3}
    assert replay("dmpo", single).loss == pytest.approx(replay("dpo", batch, options={"data": "sampled"}).loss)


def test_without_an_environment_it_is_refused() -> None:
    algorithm = DMPO(DMPO.Config())
    with pytest.raises(ValueError, match="there is no environment; name one"):
        algorithm.check(RunFacts(8, 16, 512, 1, ("math",)))
    assert algorithm.check(RunFacts(8, 16, 512, 1, ("math", ENVIRONMENT))) == ()


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("dmpo")
