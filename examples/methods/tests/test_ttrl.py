"""TTRL's majority, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_reward, make_rollouts
from mmrl_methods.answers import answer_in
from mmrl_methods.ttrl import TTRL


def scores(texts: list[str], answer: Any = None, **options: Any) -> list[Any]:
    return [*TTRL(TTRL.Config(**options)).score(make_rollouts(texts, answer=answer))]


def test_the_most_frequent_answer_earns_1() -> None:
    """Answers 7, 7, 8, 1/2, 7 and none: 7 has three votes of six completions."""
    texts = ["so \\boxed{7}", "<answer>7.0</answer>", "it is 8", "\\boxed{0.5}", "first 3, then 7", "I do not know"]
    found = scores(texts, answer="8")
    assert [each["score"] for each in found] == [1, 1, 0, 0, 1, 0]
    assert all(each["majority_share"] == 0.5 and each["label_right"] == 0 for each in found)
    assert scores(texts, answer=["5", 7])[0]["label_right"] == 1
    assert scores(texts)[0]["label_right"] is None


def test_answers_that_are_equally_frequent_are_all_labels() -> None:
    assert [each["score"] for each in scores(["1", "1", "2", "2", "3"])] == [1, 1, 1, 1, 0]
    assert [each["score"] for each in scores(["1", "2", "3"])] == [1, 1, 1]


def test_a_group_without_an_answer_has_no_label() -> None:
    assert scores(["no", "none"], answer="7") == [{"score": 0.0, "majority_share": 0.0, "label_right": None}] * 2


def test_a_greedy_completion_has_no_vote_in_its_group() -> None:
    group = make_rollouts(["1", "1", "2"])
    greedy = replace(make_rollouts(["2"])[0], prompt=group[0].prompt, greedy=True)
    found: list[Any] = [*TTRL(TTRL.Config()).score([*group, greedy])]
    assert [each["score"] for each in found] == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\frac{1}{2}} or \\boxed{ X }", "x"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("$1,000.50$", "2001/2"),
        ("\\boxed{1,2}", "1,2"),
        ("it is 1,234,567, I think", "1234567"),
        ("1 and 2,", "2"),
        ("\\boxed{12,}", "12"),
        ("\\boxed{3/0}", "3/0"),
        ("\\boxed{1", "1"),
        ("<ANSWER> Two  cats. </ANSWER> 9", "two cats"),
        ("no", None),
        ("\\boxed{}", None),
    ],
)
def test_an_answer_has_one_spelling(text: str, answer: str | None) -> None:
    assert answer_in(text) == answer


def test_a_pattern_takes_the_place_of_marks() -> None:
    assert [each["score"] for each in scores(["A, then B: 1", "B: 2", "A"], pattern="[AB]")] == [1, 1, 0]
    assert [each["majority_share"] for each in scores(["go left 3", "5"], pattern="go (left|right)")] == [0.5, 0.5]
    assert [each["score"] for each in scores(["7", "\\boxed{7}"], marked=True)] == [0, 1]


def test_hostile_completions_take_no_time() -> None:
    assert scores(["\\boxed{" * 5000, "{" * 30_000, "1," * 20_000])


def test_a_group_of_one_and_a_vote_without_other_rewards_are_noticed() -> None:
    facts = RunFacts(group_size=8, prompts_per_step=1, max_new_tokens=8, updates_per_batch=1, rewards=("ttrl",))
    assert "weight 0" in TTRL(TTRL.Config()).check(facts)[0]
    assert TTRL(TTRL.Config()).check(replace(facts, rewards=("ttrl", "exact"))) == []
    with pytest.raises(ValueError, match=r"sampler\.group_size, now 1"):
        TTRL(TTRL.Config()).check(replace(facts, group_size=1))
    with pytest.raises(ValueError, match="no regular expression"):
        TTRL.Config(pattern="(")


def test_it_keeps_the_rules_of_rewards() -> None:
    check_reward("ttrl")
    check_reward("ttrl", options={"pattern": r"\d", "marked": True})
