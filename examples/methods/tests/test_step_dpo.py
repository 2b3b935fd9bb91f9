"""Step-DPO: what candidates share cancels, the loss is that of the steps, and rows of another kind are told of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.testing import check_algorithm, replay
from mmrl.types import Candidate, Message, Prompt
from mmrl_methods.step_dpo import StepDPO


def batch(shared: Any) -> dict[str, Any]:
    """Two shared tokens with these log-ratios, then a step of two tokens, 0.4 and 0.2, and one of one token, -0.6."""
    ratios = np.array([[*shared, 0.4, 0.2], [*shared, -0.6, 0.0]])
    reference = np.full((2, 4), -3.0)
    tokens = {"response_mask": [[1, 1, 1, 1], [1, 1, 1, 0]], "ref_log_probs": reference}
    return {
        "group_ids": [0, 0],
        "rewards": [1.0, 0.0],
        "log_probs": reference + ratios,
        "rollout_log_probs": reference,
        **tokens,
    }


def test_the_loss_is_that_of_the_steps_whatever_the_shared_tokens_are() -> None:
    """beta 0.5: margin 0.5 (0.6 + 0.6) = 0.6, log(1 + e^-0.6) = 0.437488, slope -0.5/(1 + e^0.6) = -0.177172."""
    for shared in ([0.0, 0.0], [1.5, -2.0]):
        result = replay("step_dpo", batch(shared))
        assert result.loss == pytest.approx(math.log(1 + math.exp(-0.6))) == pytest.approx(0.437488, abs=1e-6)
        slope = 0.177172
        np.testing.assert_allclose(result.grad_log_probs[:, 2:], [[-slope] * 2, [slope, 0]], atol=1e-6)
        # The shared tokens are the same in both rows, so a network's gradient is the sum of the two: nothing.
        np.testing.assert_allclose(result.grad_log_probs[:, :2].sum(0), 0.0, atol=1e-12)


def row(*texts: str) -> Prompt:
    candidates = tuple(Candidate(text, 1.0 - place) for place, text in enumerate(texts))
    return Prompt("1", (Message("user", "q"),), candidates=candidates)


FIRST = "Step 1: 2 and 2 are 4.\n"


def test_rows_of_single_steps_are_fine_and_others_are_told_of() -> None:
    algorithm = StepDPO(StepDPO.Config())
    good = row(f"{FIRST}Step 2: so 8.", f"{FIRST}Step 2: so 9.")
    whole = row(f"{FIRST}Step 2: so 8.\nStep 3: done.", f"{FIRST}Step 2: so 9.")
    apart = row("Step 1: 8.", "Step 1: 9.")
    assert list(algorithm.check_rows([good, good, apart])) == []
    (long,) = algorithm.check_rows([good, whole])
    assert "1 of 2 rows go on for more than a step" in long and "end each after the step" in long
    (none,) = algorithm.check_rows([apart, apart, good])
    assert "2 of 3 rows share no step" in none and "algorithm.step" in none
    paragraphs = StepDPO(StepDPO.Config(step=r"\n\n"))
    assert list(paragraphs.check_rows([row("a\n\nb", "a\n\nc")])) == []


def test_a_step_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match="step is no regular expression"):
        check_algorithm("step_dpo", options={"step": "("})


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("step_dpo")
