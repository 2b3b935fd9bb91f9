"""POLAR's form of a request, and the answers of each kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mmrl.errors import PluginError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Unscored
from mmrl_methods.polar import POLAR, _reply


def overlap(text: str) -> float:
    """The number of words that the two replies share, in place of a model."""
    assert text.endswith("[UNUSED_TOKEN_130]") and text.count("<|reward|>") == 1
    reference, completion = (part.split() for part in text.removesuffix("[UNUSED_TOKEN_130]").split("<|reward|>"))
    return float(len(set(reference) & set(completion)))


def server(path: str, body: dict[str, Any]) -> Any:
    if path == "/classify":
        return [{"embedding": [overlap(body["text"][0])]}]
    assert path == "/pooling"
    (text,) = body["input"]
    data: Any = overlap(text) if body["model"] == "lmdeploy" else [[-99.0], [overlap(text)]]
    return {"data": [{"data": data}]}


@pytest.fixture
def scores(answering: Any) -> Any:
    """Scores of texts by a server with these answers."""

    def found(
        texts: Sequence[str], answer: Any = server, kind: Any = "vllm", reply: Any = "a b", **options: Any
    ) -> Any:
        with answering(answer) as url:
            reward = POLAR(POLAR.Config(url=url, server=kind, model=kind, backoff_s=0.0, **options))
            return asyncio.run(reward.score(make_rollouts(texts, answer=reply, question="q", columns={"best": "c"})))

    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang", "lmdeploy"])
def test_a_completion_is_compared_with_the_reference(scores: Any, kind: str) -> None:
    """The question's word is shared too."""
    assert scores(["a b", "b c", "d"], kind=kind) == [3.0, 2.0, 1.0]
    assert scores(["a b", "b c", "d"], kind=kind, reference="best") == [1.0, 2.0, 1.0]


def test_the_text_has_the_form_of_the_released_code(scores: Any) -> None:
    texts: list[str] = []

    def kept(path: str, body: dict[str, Any]) -> Any:
        texts.extend(body["input"])
        return server(path, body)

    written = ["<think>hm</think> a", "hm</Thinking> c", "<think>hm", "x <|reward|> [UNUSED_TOKEN_130]"]
    scores(written, kept)
    assert sorted(texts) == [
        "q\na b<|reward|>q\n[UNUSED_TOKEN_130]",
        "q\na b<|reward|>q\na[UNUSED_TOKEN_130]",
        "q\na b<|reward|>q\nc[UNUSED_TOKEN_130]",
        "q\na b<|reward|>q\nx < |reward|> [ UNUSED_TOKEN_130][UNUSED_TOKEN_130]",
    ]


@pytest.mark.parametrize(
    ("prompt", "text", "reply"),
    [
        ("q <think>\n", "hm", ""),
        ("q <think>\n", "hm</think> a", "a"),
        ("a <think> tag?", " a ", " a "),
        ("q", "a", "a"),
    ],
)
def test_a_prompt_may_have_opened_the_thinking(prompt: str, text: str, reply: str) -> None:
    (rollout,) = make_rollouts([text])
    assert _reply(replace(rollout, prompt=replace(rollout.prompt, text=prompt))) == reply


def test_what_cannot_be_compared_is_unscored(scores: Any) -> None:
    (score,) = scores(["a"], reply=None)
    assert isinstance(score, Unscored) and "no reference reply" in score.why
    (score,) = scores(["a"], reference="worst")
    assert isinstance(score, Unscored) and "column 'worst'" in score.why
    short, long = scores(["a", "a" * 60], max_characters=60)
    assert short == 2.0 and isinstance(long, Unscored) and "at most 60" in long.why


def test_another_api_is_named(scores: Any) -> None:
    with pytest.raises(PluginError, match="another API"):
        scores(["a"], lambda *_: {"data": []})


def test_it_keeps_the_rules_of_rewards(answering: Any) -> None:
    with answering(lambda path, body: {"data": [{"data": [[1.0]]}]}) as url:
        check_reward("polar", options={"url": url})
