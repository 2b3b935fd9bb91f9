"""EndoRM against another path through the formula: a log-likelihood, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import ImageRef, Rollout, Segment, Unscored
from mmrl_methods.endorm import EndoRM

PROMPT, TOKENS = [3, 5, 2], [7, 1, 4, 0]


@pytest.fixture(scope="module")
def folder(write_model: Callable[..., Path]) -> Path:
    return write_model("CausalLM", vocabulary=300)


def rollout(tokens: list[int], *, truncated: bool = False, by_policy: list[bool] | None = None) -> Rollout:
    (made,) = make_rollouts(["x"], truncated=truncated)
    prompt = replace(made.prompt, token_ids=np.array(PROMPT, np.int32))
    segments = [
        Segment(np.array([token], np.int32), own, np.zeros(1, np.float32))
        for token, own in zip(tokens, by_policy or [True] * len(tokens), strict=True)
    ]
    return replace(made, prompt=prompt, segments=tuple(segments))


def reward(folder: Path, **options: Any) -> EndoRM:
    return EndoRM(EndoRM.Config(path=str(folder), device="cpu", **options))


def logits(folder: Path, tokens: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([PROMPT + tokens])).logits[0].double()


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_sum_is_the_likelihood_and_the_value_of_the_prompt(folder: Path, alpha: float) -> None:
    """alpha sum log softmax(Q / alpha) + V(s_1), where the values between cancel."""
    import torch

    scores = logits(folder, TOKENS)
    log_pi = torch.log_softmax(scores / alpha, -1)
    likelihood = sum(float(log_pi[len(PROMPT) - 1 + place, token]) for place, token in enumerate(TOKENS))
    first = alpha * float(torch.logsumexp(scores[len(PROMPT) - 1] / alpha, -1))
    found = reward(folder, alpha=alpha).score_one(rollout(TOKENS))
    assert found == pytest.approx(
        {"score": alpha * likelihood + first, "per_token": (alpha * likelihood + first) / 4}, rel=1e-5
    )


def test_a_completion_that_is_cut_off_does_not_end(folder: Path) -> None:
    import torch

    whole = reward(folder).score_one(rollout(TOKENS))
    cut = reward(folder).score_one(rollout(TOKENS, truncated=True))
    last = float(torch.logsumexp(logits(folder, TOKENS)[-1], -1))
    assert isinstance(whole, dict) and isinstance(cut, dict)
    assert whole["score"] - cut["score"] == pytest.approx(last, rel=1e-5)


def test_tokens_of_an_environment_have_no_reward(folder: Path) -> None:
    """Q(s_h, a_h) - V(s_{h+1}) of tokens 0, 1 and 3: the value after token 1 is that of what the policy then reads."""
    import torch

    scores, at = logits(folder, TOKENS), len(PROMPT) - 1
    value = torch.logsumexp(scores, -1)
    parts = [float(scores[at + h, TOKENS[h]] - (value[at + h + 1] if h < 3 else 0)) for h in (0, 1, 3)]
    found = reward(folder).score_one(rollout(TOKENS, by_policy=[True, True, False, True]))
    assert found == pytest.approx({"score": sum(parts), "per_token": sum(parts) / 3}, rel=1e-5)


def test_what_it_cannot_read_is_unscored_or_refused(folder: Path) -> None:
    image = ImageRef("0", 28, 28, "nowhere.png")
    (made,) = make_rollouts(["x"], images=[image])
    assert isinstance(reward(folder).score_one(made), Unscored)
    assert reward(folder).check_rows([made.prompt]) == ["1 of 1 rows have images, which endorm does not read"]
    assert isinstance(reward(folder, max_tokens=6).score_one(rollout(TOKENS)), Unscored)
    with pytest.raises(ConfigError, match="the policy's token 300 is not among the model's 300"):
        reward(folder).score_one(rollout([300]))
    with pytest.raises(ConfigError, match="the model cannot be read"):
        reward(folder / "none").prepare()


def test_it_keeps_the_rules_of_rewards(folder: Path) -> None:
    check_reward("endorm", options={"path": str(folder), "device": "cpu"})
