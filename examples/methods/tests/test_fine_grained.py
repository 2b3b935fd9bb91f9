"""Fine-grained rewards: parts of texts by hand, and values against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Spans, Unscored
from mmrl_methods.fine_grained import FineGrained, clauses, sentences

TEXT = "a b . c d\n\ne a ! b"


@pytest.fixture(scope="module")
def folder(write_model: Callable[..., Path]) -> Path:
    return write_model("TokenClassification", num_labels=3)


def parts(text: str, places: list[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in places]


def test_sentences_end_at_marks_and_lines() -> None:
    assert parts(TEXT, sentences(TEXT)) == ["a b .", "c d", "e a !", "b"]
    assert parts("It is 3.5 m. Really?! Yes", sentences("It is 3.5 m. Really?! Yes")) == [
        "It is 3.5 m.",
        "Really?!",
        "Yes",
    ]
    assert sentences(" \n ") == sentences("") == []


def test_clauses_have_five_words_on_either_side() -> None:
    text = "One two three four, five six seven eight nine ten; a b c d e, f g h. Short, one."
    assert parts(text, clauses(text)) == [
        "One two three four, five six seven eight nine ten;",
        "a b c d e, f g h.",
        "Short, one.",
    ]


def test_values_are_the_models_labels_at_the_separators(folder: Path) -> None:
    """The same text, tokens and labels by hand: the separator is token 0."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    (rollout,) = make_rollouts([TEXT], question="Q")
    reward = FineGrained(FineGrained.Config(path=str(folder), device="cpu", positive=0.3, negative=-0.2))
    found = reward.score_one(rollout)
    assert isinstance(found, Spans)
    asked = "question: Q answer: </s> a b . </s> c d </s> e a ! </s> b"
    ids = AutoTokenizer.from_pretrained(folder)(asked, return_tensors="pt")["input_ids"]
    logits = AutoModelForTokenClassification.from_pretrained(folder)(ids).logits[0]
    expected = [0.3 if logit[2] > logit[1] else -0.2 for logit in logits[ids[0] == 0]]
    assert [value for *_, value in found.spans] == expected and len(set(expected)) == 2
    assert parts(TEXT, [(start, end) for start, end, _ in found.spans]) == ["a b .", "c d", "e a !", "b"]
    assert found.value == pytest.approx(sum(expected))
    assert torch.isfinite(logits).all()


def test_a_separator_of_the_policy_is_no_part(folder: Path) -> None:
    (rollout,) = make_rollouts(["a </s> b . c"], question="Q")
    found = FineGrained(FineGrained.Config(path=str(folder), device="cpu")).score_one(rollout)
    assert isinstance(found, Spans) and len(found.spans) == 2


def test_what_it_cannot_value_is_unscored_or_refused(folder: Path) -> None:
    empty, long = make_rollouts([" ", "a " * 20], question="Q")
    reward = FineGrained(FineGrained.Config(path=str(folder), device="cpu", max_tokens=10))
    assert reward.score_one(empty) == Spans(0.0, ())
    assert isinstance(reward.score_one(long), Unscored)
    with pytest.raises(ConfigError, match="cannot be told from none"):
        check_reward("fine_grained", options={"path": str(folder), "negative": 0.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": [1, 3]}, "the model has 3 labels"),
        ({"separator": "a b"}, "is no token of its own"),
    ],
)
def test_options_that_the_model_does_not_fit_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    (rollout,) = make_rollouts(["a b . c"], question="Q")
    config = FineGrained.Config.model_validate({"path": str(folder), "device": "cpu", **options}, strict=False)
    with pytest.raises(ConfigError, match=message) as caught:
        FineGrained(config).score_one(rollout)
    assert str(folder) in caught.value.where


@pytest.mark.parametrize(
    "options", [{"labels": [2, 2]}, {"labels": [0, -1]}, {"positive": float("nan")}, {"separator": ""}]
)
def test_options_without_a_meaning_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FineGrained.Config.model_validate({"path": str(folder), **options}, strict=False)


def test_it_keeps_the_rules_of_rewards(folder: Path) -> None:
    check_reward("fine_grained", options={"path": str(folder), "device": "cpu", "unit": "clause"})
