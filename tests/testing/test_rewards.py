"""The checks of rewards: each rule is broken once."""

from __future__ import annotations

import asyncio
import math
from types import MappingProxyType

import numpy as np
import pytest

from mmrl.errors import PluginError
from mmrl.interfaces import PluginConfig, Reward
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import ImageRef, Spans


class Good(Reward):
    class Config(PluginConfig):
        column: str = "problem"

    def score(self, rollouts):
        return [None if r.answer is None else len(r.columns[self.config.column]) / (1 + len(r.text)) for r in rollouts]


def scoring_one(score_one):
    return type("Single", (Reward,), {"score_one": score_one})


async def late(self, rollout):
    await asyncio.sleep(0)
    return float(len(rollout.text))


async def late_batch(self, rollouts):
    return [await late(self, rollout) for rollout in rollouts]


def scoring(score, **attributes):
    return type("Faulty", (Good,), {"score": score, **attributes})


def draw(self, rollouts):
    return np.random.default_rng().random(len(rollouts))


def spoil(self, rollouts):
    for rollout in rollouts:
        rollout.columns["seen"] = True
    return [0.0] * len(rollouts)


def spoil_tokens(self, rollouts):
    for rollout in rollouts:
        rollout.segments[0].sampler_logprobs[:1] = 0
    return [0.0] * len(rollouts)


@pytest.mark.parametrize(
    ("reward", "rule", "detail"),
    [
        (scoring(lambda self, rs: [1.0] * (len(rs) + 1)), "one per rollout", "7 scores"),
        (scoring(lambda self, rs: [float("nan")] * len(rs)), "a finite number", "rollout 0 of 'What is 3 + 4?'"),
        (scoring(lambda self, rs: ["1"] * len(rs)), "a finite number", "str '1'"),
        (scoring(lambda self, rs: 1.0), "a list of 6 numbers", "float 1.0"),
        (scoring(lambda self, rs: sorted(len(r.text) for r in rs)), "scores keep order", "then"),
        (scoring(lambda self, rs: list(range(len(rs)))), "scores keep order", "no memory of earlier calls"),
        (scoring(draw), "the same rollouts get the same scores", "no random numbers"),
        (scoring(spoil), "rollouts stay as they are", "work on copies"),
        (scoring(spoil_tokens), "rollouts stay as they are", "rollout 0 of"),
        (scoring(lambda self, rs: [len(r.text.split()[0]) for r in rs]), "rollouts can be scored", "IndexError"),
        (scoring(lambda self, rs: [r.columns["unit"] for r in rs]), "rollouts can be scored", "pass rollouts"),
        (scoring(lambda self, rs: [max(map(len, (r.text for r in rs)))] * len(rs)), "(0, none)", "ValueError"),
        (scoring(Good.score, penalty="yes"), "penalty is True or False", "make it a bool"),
        (
            scoring(lambda self, rs: [Spans(1.0, ((0, 9, 0.5),)) for _ in rs]),
            "spans within the text, 0 <= start < end <= 1 character",
            "the span from 0 to 9; rollout 1 of",
        ),
    ],
)
def test_a_broken_rule_is_named_with_what_shows_it_and_what_to_do(reward, rule, detail) -> None:
    with pytest.raises(PluginError) as caught:
        check_reward(reward)
    text = str(caught.value)
    assert rule in text and detail in text
    assert "Faulty" in text


def test_a_reward_that_keeps_the_rules_passes_as_class_itself_or_file(tmp_path) -> None:
    check_reward(Good)
    check_reward(Good(Good.Config()))
    (tmp_path / "rewards.py").write_text(
        "def short(rollouts, below=3):\n    return [len(r.text) < below for r in rollouts]"
    )
    check_reward(f"{tmp_path / 'rewards.py'}:short", options={"below": 10})


def test_a_reward_for_references_in_text_passes_but_no_score_may_be_wrong_for_other_references() -> None:
    check_reward(scoring(lambda self, rs: [float(r.answer in r.text) for r in rs]))
    with pytest.raises(PluginError, match="a finite number"):
        check_reward(scoring(lambda self, rs: [1.0 if isinstance(r.answer, str) else math.nan for r in rs]))


def test_a_reward_is_given_images() -> None:
    by_width = scoring(lambda self, rs: [r.images[0].width for r in rs])
    check_reward(by_width, rollouts=make_rollouts(["a cat"], images=[ImageRef("0" * 64, 28, 56, "0.png")]))
    with pytest.raises(PluginError, match="pass rollouts that suit it"):
        check_reward(by_width)


def test_a_reward_is_given_the_rollouts_that_it_needs_prompt_by_prompt() -> None:
    seen = []

    class Sees(Good):
        def score(self, rollouts):
            seen.append([rollout.prompt.id for rollout in rollouts])
            return super().score(rollouts)

    columns = MappingProxyType({"unit": "cm"})
    metres, feet = (
        make_rollouts(["7 cm", "", "8"], answer="7", columns=columns, question=question, truncated=True)
        for question in ("In metres?", "In feet?")
    )
    assert {rollout.finish_reason for rollout in metres} == {"length"}
    check_reward(Sees, options={"column": "unit"}, rollouts=[*metres, *feet])
    assert {tuple(ids) for ids in seen} == {("In metres?",) * 3, ("In feet?",) * 3, ()}
    with pytest.raises(PluginError, match="KeyError"):
        check_reward(Sees, rollouts=metres)


@pytest.mark.parametrize("reward", [scoring_one(lambda self, r: float(len(r.text))), scoring_one(late)])
def test_rollouts_may_be_scored_one_by_one_sync_or_async(reward):
    check_reward(reward)
    check_reward(scoring(late_batch))


def test_one_by_one_keeps_the_same_rules():
    with pytest.raises(PluginError, match="the same rollouts get the same scores"):
        check_reward(scoring_one(lambda self, r: float(np.random.default_rng().random())))
