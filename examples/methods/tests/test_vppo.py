"""VPPO: chosen tokens and weights of completions against plain numpy, the gradient, and the state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.policy_gradient import KLOptions
from mmrl.testing import check_algorithm, replay
from mmrl_methods.vppo import VPPO

OLD = np.full((2, 5), -1.0)
GAPS = np.array([[0.0, -2.0, 0.5, -0.1, 9.0], [-1.0, 0.2, 0.0, 0.0, 0.0]])
"""Log-ratios of the policy given the masked view and given the image."""


@pytest.fixture
def batch() -> dict[str, Any]:
    """A good completion of four tokens and a bad one of five; the fifth of the first is masked."""
    return {
        "group_ids": [1, 1],
        "rewards": [1.0, 0.0],
        "response_mask": [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        "log_probs": OLD,
        "old_log_probs": OLD,
        "rollout_log_probs": OLD,
        "views": {"masked": {"log_probs": OLD + GAPS}},
    }


def test_the_tokens_that_depend_most_on_the_image_are_learned(batch: dict[str, Any]) -> None:
    """exp(x) - 1 - x of the first: 0, 1.135335, 0.148721, 0.004837; of ceil(0.4 4) = 2 tokens the second and the third.
    Of the second: 0.367879, 0.021403, 0, 0, 0, so the first two of five."""
    result = replay("vppo", batch)
    chosen = np.array([[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    size = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(result.grad_log_probs, size / 9 * chosen * [[-1], [1]], rtol=1e-5)
    assert result.metrics["perception/token_fraction"] == pytest.approx(4 / 9)
    dependency = (1.135335 + 0.148721 + 0.004837) / 4, (0.367879 + 0.021403) / 5
    assert result.metrics["perception/dependency"] == pytest.approx(np.mean(dependency), abs=1e-6)
    assert not result.grad_views["masked"]["log_probs"].any()


def test_completions_are_weighed_by_their_dependency_over_that_of_the_step_before(batch: dict[str, Any]) -> None:
    """scale_min 0.8 and a mean of 0.1: 0.8 + 0.2 S/0.1, with S 0.322223 and 0.077856."""
    config = VPPO.Config(scale_min=0.8)
    algorithm = VPPO(config)
    algorithm.restore({"dependency": 0.1})
    weighed = replay(algorithm, batch).grad_log_probs
    plain = replay(VPPO(config), batch).grad_log_probs
    np.testing.assert_allclose(weighed[0, 1] / plain[0, 1], 0.8 + 2 * 0.322223, rtol=1e-5)
    np.testing.assert_allclose(weighed[1, 0] / plain[1, 0], 0.8 + 2 * 0.077856, rtol=1e-5)


def test_the_step_before_is_kept_in_checkpoints(batch: dict[str, Any]) -> None:
    algorithm = VPPO(VPPO.Config(kl=KLOptions(coef=0.1, target=0.1)))
    algorithm.observe({"perception/dependency": 0.3})
    other = VPPO(VPPO.Config())
    other.restore(algorithm.state())
    assert other.state()["dependency"] == 0.3 and algorithm.state()["kl_coef"] == 0.1


def test_a_prompt_without_images_learns_all_of_its_tokens(batch: dict[str, Any]) -> None:
    result = replay("vppo", {**batch, "has_images": [False, False]})
    assert result.metrics["perception/token_fraction"] == 1 and "perception/dependency" not in result.metrics


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("vppo")
    assert list(VPPO(VPPO.Config()).check(RunFacts(8, 16, 512, 1, ("math",)))) == []
