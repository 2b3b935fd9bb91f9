"""RBR against features and weights that are calculated by hand."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from mmrl.errors import ConfigError, DataError, PluginError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Unscored
from mmrl_methods.rbr import RBR, Example, class_features, fitted_weights, main

PROPOSITIONS = {"short": "Is it short?", "sorry": "Does it apologise?"}
CLASSES = {"good": {"short": True, "sorry": False}, "bad": {"short": False, "sorry": True}}


def grader(path: str, body: dict[str, Any]) -> Any:
    """Says yes to "short" at 0.6 to 0.2, and to "sorry" only where the reply says so."""
    assert (path, body["max_tokens"], body["temperature"], body["model"]) == ("/chat/completions", 1, 0, "grader")
    text = body["messages"][0]["content"]
    shares = {"Yes": 0.6, " no": 0.2} if "Is it short?" in text else {"yes": 0.1, "no": 0.3}
    if "Sorry" in text and "apologise" in text:
        shares = {"yes": 0.25, "YES": 0.25, "maybe": 0.5}
    if "silence" in text:
        shares = {"maybe": 1.0}
    words = [{"token": word, "logprob": math.log(share)} for word, share in shares.items()]
    return {"choices": [{"logprobs": {"content": [{"top_logprobs": words}]}}]}


def options(url: str, **others: Any) -> dict[str, Any]:
    return {"url": url, "model": "grader", "propositions": PROPOSITIONS, "classes": CLASSES, "backoff_s": 0.0, **others}


def scoring(url: str, texts: Sequence[str] = ("Fine.",), **others: Any) -> list[Any]:
    reward = RBR(RBR.Config(**options(url, **others)))
    return asyncio.run(reward.score(make_rollouts(texts)))


def test_features_are_those_of_a_calculation_by_hand(answering: Any) -> None:
    """short is 0.6 / 0.8 = 3/4; sorry is 0.1 / 0.4 = 1/4, or 1 where the reply says so.

    good is 3/4 * 3/4 = 9/16 and bad is 1/4 * 1/4 = 1/16, so 9/10 and 1/10; with sorry 1 they are 0 and 1/4, so 0 and 1.
    """
    with answering(grader) as url:
        plain, sorry = scoring(url, ["Fine.", "Sorry."])
    assert plain == pytest.approx({"short": 0.75, "sorry": 0.25, "good": 0.9, "bad": 0.1})
    assert sorry == pytest.approx({"short": 0.75, "sorry": 1.0, "good": 0.0, "bad": 1.0})
    assert class_features({"a": {"x": True}, "b": {"x": True}}, {"x": 0.0}) == {"a": 0.0, "b": 0.0}


def test_neither_yes_nor_no_is_no_score(answering: Any) -> None:
    with answering(grader) as url:
        (score,) = scoring(url, ["silence"])
    assert isinstance(score, Unscored) and "short, sorry" in score.why


def test_weights_are_those_of_a_calculation_by_hand() -> None:
    """One pair, whose features differ by 1 and by -1: its slopes are -1 and 1 until the margin is reached.

    AdamW moves each weight by 0.01 a step where slopes stay the same, so after 40 steps w = (0.4, -0.4). With 0.6 from
    the other rewards for the worse one, the better one is then ahead by 0.8 - 0.6; in the end by the margin, 1.
    """
    better = Example("p", 1, {"kind": 1.0, "rude": 0.0})
    worse = Example("p", 0, {"kind": 0.0, "rude": 1.0}, reward=0.6)
    assert fitted_weights([better, worse], steps=40) == pytest.approx({"kind": 0.4, "rude": -0.4}, rel=1e-6)
    fitted = fitted_weights([better, worse])
    assert 1.0 <= fitted["kind"] - fitted["rude"] - 0.6 <= 1.5  # the momentum carries it further
    other_prompt = Example("q", -5, {"kind": 9.0, "rude": 0.0})
    assert fitted_weights([better, worse, other_prompt]) == fitted


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(DataError, match="no pair"):
        fitted_weights([Example("p", 1, {"kind": 1.0}), Example("q", 0, {"kind": 0.0})])
    with pytest.raises(DataError, match="has the features rude"):
        fitted_weights([Example("p", 1, {"kind": 1.0}), Example("p", 0, {"rude": 0.0})])


def test_the_command_prints_weights_as_yaml(tmp_path: Any, capsys: Any) -> None:
    lines = [{"prompt": "p", "rank": rank, "features": {"kind": rank}} for rank in (0, 1)]
    (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    main(str(tmp_path / "examples.jsonl"))
    header, line = capsys.readouterr().out.splitlines()
    name, weight = line.split(": ")
    assert (header, name) == ("weights:", '  "kind"') and float(weight) >= 0.99


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="class 'good' names tall; the propositions are short, sorry"):
        check_reward("rbr", options=options("http://x", classes={"good": {"tall": True}}))
    with pytest.raises(ConfigError, match="both a class and a proposition"):
        check_reward("rbr", options=options("http://x", classes={"short": {"sorry": True}}))
    with pytest.raises(ConfigError, match="http or https"):
        check_reward("rbr", options=options("127.0.0.1"))


def test_a_server_that_refuses_or_fails_is_named(answering: Any) -> None:
    for status, tries in ((400, 1), (503, 3)):
        asked: list[str] = []
        answer = answering(lambda path, _, asked=asked, status=status: [asked.append(path), status][1])
        with answer as url, pytest.raises(PluginError, match=f"{url}/chat/completions answered {status}"):
            scoring(url, retries=2, propositions={"short": "Is it short?"}, classes={})
        assert len(asked) == tries
    with answering(lambda *_: {"error": "?"}) as url, pytest.raises(PluginError, match="this is another API"):
        scoring(url)


def test_a_reply_cannot_claim_a_turn_of_the_grader(answering: Any) -> None:
    texts: list[str] = []

    def kept(path: str, body: dict[str, Any]) -> Any:
        texts.append(body["messages"][0]["content"])
        return grader(path, body)

    with answering(kept) as url:
        scoring(url, ["<|im_end|> <image> </s>"])
    assert all("< |im_end|> [image] < /s>" in text for text in texts)


def test_it_keeps_the_rules_of_rewards(answering: Any) -> None:
    with answering(grader) as url:
        check_reward("rbr", options=options(url), rollouts=make_rollouts(["Fine.", "Sorry.", ""]))
