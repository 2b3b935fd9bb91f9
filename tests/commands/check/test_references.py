"""What ``mmrl check`` says of reference answers, row by row, and of rewards that are no accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmrl.commands.check.reference_report import ReferenceReport
from mmrl.commands.check.references import check_references
from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import DataError
from mmrl.rollout.rewards.scorer import PooledReward, Scorer
from mmrl.types import Message, Prompt

REWARDS = """
import re
import time

def answer(text):
    return re.sub(r"\\\\boxed\\{(.*)\\}|<answer>(.*)</answer>", r"\\1\\2", text)

def same(rollouts):
    return [None if r.answer == "?" else float(answer(r.text) == str(r.answer)) for r in rollouts]

def shaped(rollouts):
    return [1.0 if answer(r.text) == str(r.answer) else 0.1 * answer(r.text).lstrip("-").isdigit() for r in rollouts]

calls = {}

def slow(rollouts):
    answer = rollouts[0].answer
    calls[answer] = calls.get(answer, 0) + 1
    time.sleep(0.06 * len(rollouts) if calls[answer] <= int(answer) else 0)
    return same(rollouts)
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PooledReward]]:
    """A reward that compares texts, one that gives a tenth to numbers, and ``math``, in one worker."""
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    names = {"same": f"{path}:same", "shaped": f"{path}:shaped", "slow": f"{path}:slow", "math": "math"}
    with Scorer([RewardSpec(name=name) for name in names.values()], workers=1) as scorer:
        yield {name: scorer.reward(place) for place, name in enumerate(names)}


def graded(reward: PooledReward, *answers: Any) -> ReferenceReport:
    question = (Message("user", "How many?"),)
    prompts = [Prompt(f"rows/{place}", question, answer=answer) for place, answer in enumerate(answers)]
    return check_references(prompts, reward, "'mine'")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (float(np.float32(0.1)), "right 0, wrong 0, written '0.1'"),
        (0.1 + 0.2, "right 0, wrong 0, written '0.3'"),
        ("29.700000762939453", "right 0, wrong 0, written '29.7'"),
        ("\\frac{1", "right 0, wrong 0, written '\\\\frac{1}'"),
        ("$$", "right 0, wrong 0, written ''"),
        ("\\boxed{", "right 0, wrong 0, written ''"),
    ],
)
def test_a_text_that_nobody_writes_is_not_accepted_for_itself(
    answer: Any, why: str, rewards: dict[str, PooledReward]
) -> None:
    report = graded(rewards["same"], answer, "7")
    assert [(name, found) for name, _, found in report.rejected] == [("rows/0", why)]
    (warning,) = report.problems("data.train, column answer", 0.5, alone=True)
    assert (
        isinstance(warning, str) and warning.startswith("data.train, column answer: rows/0: ") and "; choose" in warning
    )
    (error,) = report.problems("data.train, column answer", 0.0, alone=True)
    assert isinstance(error, DataError) and "rows/0" in error.where and "correct or remove the rows" in error.remedy


def test_a_reference_is_slow_if_it_is_so_each_time(
    rewards: dict[str, PooledReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's first call imports packages, and the next one may go to another worker."""
    monkeypatch.setattr("mmrl.commands.check.references.SLOW_S", 0.05)
    report = graded(rewards["slow"], 0, 2, 99)
    assert [name for name, _, _ in report.slow] == ["rows/2"] and report.graded == 3


@pytest.mark.parametrize(
    "answer", ["The answer is 5", "12,345", "2.50", "50\\%", "\\left(1, 2\\right)", "$x$", "x\n#### 72", "\\text{odd}"]
)
def test_a_spelling_that_is_accepted_alone_is_told(answer: str, rewards: dict[str, PooledReward]) -> None:
    report = graded(rewards["same"], answer, "7")
    assert [name for name, _, _ in report.misspelled] == ["rows/0"] and report.rejected == []
    (warning,) = report.problems("data.train, column answer", 0.0, alone=True)
    assert isinstance(warning, str) and "1 of 2 reference answers only as they are spelled there" in warning


@pytest.mark.parametrize("tolerated", [0.1, 0.6])
def test_rows_that_a_reward_cannot_score_are_told_with_a_remedy(
    tolerated: float, rewards: dict[str, PooledReward]
) -> None:
    report = graded(rewards["same"], "?", "7", "8")
    (found,) = report.problems("data.train, column answer", tolerated, alone=True)
    assert isinstance(found, DataError if tolerated < 0.3 else str)
    assert "annot score 1 of 3 rows, whatever the answer" in str(found) and "column answer: rows/0" in str(found)
    assert "name the column that holds the answers" in str(found)


SOUND = (
    *(
        "5",
        "0.5",
        "-3",
        "12,345",
        "2.50",
        "5.0",
        "50\\%",
        "50%",
        "1/2",
        "\\frac{1}{2}",
        "$\\frac{1}{2}$",
        "\\dfrac{1}{2}",
    ),
    *("\\left( 3, \\frac{\\pi}{2} \\right)", "(1, 2)", "\\frac { 8 } { 7 }", "2 \\pi r", "x^2 + 1", "\\sqrt{2}", "B"),
    *("10 cm", "5\\text{ cm}", "\\{1, 2, 3\\}", "90^\\circ", "[0, 1)", 3.0, 0.25, 7, ["3", "4"]),
)


def test_sound_reference_answers_raise_no_alarm(rewards: dict[str, PooledReward]) -> None:
    report = graded(rewards["math"], *SOUND)
    assert (report.graded, report.unscored) == (len(SOUND), [])
    assert (report.rejected, report.misspelled, report.unboxed) == ([], [], [])
    assert list(report.problems("data.train", 0.0, alone=True)) == [] and report.partly_right() == ""


def test_a_reward_of_other_values_than_0_and_1_is_no_accuracy(rewards: dict[str, PooledReward]) -> None:
    told = graded(rewards["shaped"], "seven", "8").partly_right()
    assert "gives 0.1 to a wrong answer, and not 0 or 1 alone" in told and "share of value 1" in told
    assert graded(rewards["same"], "seven", "8").partly_right() == ""
