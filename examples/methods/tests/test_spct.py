"""SPCT's votes, added by hand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mmrl.errors import PluginError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Unscored
from mmrl_methods.spct import SPCT

Scores = Callable[..., list[Any]]
GRADES = {"good": 9, "bad": 2}


def said(text: str) -> dict[str, Any]:
    """A chat completion with this text."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judge(path: str, body: dict[str, Any]) -> Any:
    """Grades each reply by its text, one more in odd votes; vote 2 has one score too few."""
    assert path == "/chat/completions" and body["temperature"] == 1.0
    text = body["messages"][0]["content"]
    replies = re.findall(r"<reply_\d+>\n(.*)\n</reply_\d+>", text)
    scores = [GRADES.get(reply, 1) + body["seed"] % 2 for reply in replies]
    scores = scores[1:] if body["seed"] == 2 else scores
    return said(f"Clarity, 100 %. \\boxed{{1}} is an example. \\boxed{{{', '.join(map(str, scores))}}}")


@pytest.fixture
def scores(answering: Any) -> Scores:
    """Scores of texts by a judge with these answers."""

    def found(texts: Sequence[str], answer: Any = judge, **options: Any) -> list[Any]:
        with answering(answer) as url:
            return asyncio.run(SPCT(SPCT.Config(url=url, backoff_s=0.0, **options)).score(make_rollouts(texts)))

    return found


def test_votes_are_added_by_hand(scores: Scores) -> None:
    """Votes 0, 1 and 3 of four can be read. They are 9, 10, 10 and 2, 3, 3, whose means are 29/3 and 8/3."""
    good, bad, again = scores(["good", "bad", "good"], votes=4)
    assert good == again == pytest.approx({"score": 26 / 27, "votes": 3})
    assert bad == pytest.approx({"score": 5 / 27, "votes": 3})


def test_replies_are_shuffled_from_vote_to_vote_and_shown_in_bounded_numbers(scores: Scores) -> None:
    shown: list[tuple[int, list[str]]] = []

    def kept(path: str, body: dict[str, Any]) -> Any:
        found = re.findall(r"<reply_\d+>\n(.*)\n</reply_\d+>", body["messages"][0]["content"])
        shown.append((body["seed"], found))
        return judge(path, body)

    texts = [f"text {number}" for number in range(5)]
    scores(texts, kept, votes=6, together=2)
    by_vote = [[text for vote, found in shown if vote == number for text in found] for number in range(6)]
    assert all(sorted(found) == texts for found in by_vote)
    assert sorted(len(found) for _, found in shown) == [1] * 6 + [2] * 12
    assert len({tuple(sorted(map(tuple, (f for v, f in shown if v == number)))) for number in range(6)}) > 1


@pytest.mark.parametrize("text", ["none", "\\boxed{7, 8}", "\\boxed{11}", "\\boxed{0}", "\\boxed{7.5}", "\\boxed{}"])
def test_an_answer_without_a_whole_number_for_each_reply_is_no_vote(scores: Scores, text: str) -> None:
    (score,) = scores(["good"], lambda *_: said(text), votes=2)
    assert isinstance(score, Unscored)


def test_another_api_is_named(scores: Scores) -> None:
    with pytest.raises(PluginError, match="another API"):
        scores(["good"], lambda *_: [1])


def test_it_keeps_the_rules_of_rewards(answering: Any) -> None:
    with answering(judge) as url:
        check_reward("spct", options={"url": url, "votes": 3})
