"""The reward service, against real local servers."""

from __future__ import annotations

import base64
import math
import time

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import ConfigError, PluginError
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.rollout.rewards.worker import call
from mmrl.types import EncodedPrompt, ImageRef, Message, Prompt, Rollout, RolloutGroup
from mmrl_rewards.http import Http


def lengths(body, place):
    return 200, [len(item["completion"]) for item in body["items"]]


def rollouts(*texts, answer="7", columns=None, images=(), content="What?"):
    row = Prompt(
        "p1",
        (Message("user", content),),
        answer=answer,
        columns=columns or {},
        source="geo",
        choices=("6", "7"),
    )
    prompt = EncodedPrompt(prompt=row, text="", token_ids=np.zeros(0, np.int32), images=images)
    return [Rollout(prompt, (), i, text, "stop", 1) for i, text in enumerate(texts)]


def scores(service, *texts, given=None, **options):
    url = service if isinstance(service, str) else service.url
    return call(Http(Http.Config(url=url, backoff_s=0.01, **options)), given or rollouts(*texts))


def test_scores_come_back_in_order_over_several_requests(serve):
    service = serve(lengths)
    texts = ["x" * n for n in range(23)]
    assert scores(service, *texts, batch_size=3) == list(range(23))
    assert sorted(len(body["items"]) for body in service.requests) == [2, *[3] * 7]
    assert scores(service, given=None) == []


def test_the_request_holds_all_that_a_reward_sees(serve, tmp_path):
    service = serve(lambda body, place: (200, {"scores": [None] * len(body["items"])}))
    (tmp_path / "a.png").write_bytes(b"pixels")
    columns = {"n": np.int64(3), "x": math.nan, "list": np.array([1.5]), "odd": {1}}
    given = rollouts("7", columns=columns, images=(ImageRef("h", 1, 1, str(tmp_path / "a.png")),))
    assert scores(service, given=given) == [None]
    (item,) = service.requests[0]["items"]
    assert item == {
        "id": "p1", "prompt": [{"role": "user", "content": "What?"}], "completion": "7", "answer": "7",
        "columns": {"n": 3, "x": None, "list": [1.5], "odd": [1]}, "choices": ["6", "7"], "source": "geo",
        "finish_reason": "stop",
    }  # fmt: skip
    scores(service, given=given, send_images=True, columns=["n", "absent"])
    (item,) = service.requests[1]["items"]
    assert item["images"] == [base64.b64encode(b"pixels").decode()]
    assert item["columns"] == {"n": 3, "absent": None}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(serve, status):
    service = serve(lambda body, place: lengths(body, place) if place == 3 else (status, "busy"))
    assert scores(service, "abc") == [3]
    assert len(service.requests) == 3


@pytest.mark.parametrize("status", [302, 400, 401, 404, 422])
def test_other_refusals_are_errors_at_once_and_redirects_are_not_followed(serve, status):
    service = serve(lambda body, place: (status, {"detail": "no such model"}))
    with pytest.raises(PluginError, match=rf"{service.url} answered {status} .*no such model"):
        scores(service, "abc")
    assert len(service.requests) == 1


def test_a_service_that_keeps_failing_is_named_with_its_status_and_the_attempts(serve):
    service = serve(lambda body, place: (503, "busy"))
    with pytest.raises(PluginError, match=rf"{service.url} answered 503 Service Unavailable, 3 attempts"):
        scores(service, "abc")
    assert len(service.requests) == 3


def test_nobody_there_is_an_error_with_the_address():
    with pytest.raises(PluginError, match=r"http://127.0.0.1:1/x cannot be reached \(ConnectError.*2 attempts"):
        scores("http://127.0.0.1:1/x", "abc", retries=1)


def test_a_service_that_does_not_answer_in_time_is_given_up(serve):
    service = serve(lambda body, place: (time.sleep(1), (200, [1]))[1])
    with pytest.raises(PluginError, match=r"did not answer within 0\.1 s, 2 attempts"):
        scores(service, "abc", request_timeout_s=0.1, retries=1)


def test_a_body_that_trickles_is_given_up_too(serve):
    service = serve(lambda body, place: (200, b" " * (17 * 2**20)))
    with pytest.raises(PluginError, match="answered more than 16777216 bytes"):
        scores(service, "abc")


def test_no_more_requests_run_at_once_than_allowed(serve):
    def slow(body, place):
        time.sleep(0.05)
        return lengths(body, place)

    service = serve(slow)
    assert scores(service, *["ab"] * 12, batch_size=1, concurrency=3) == [2] * 12
    assert service.most == 3


@pytest.mark.parametrize(
    "given", [[1], [1, "2"], [1, True], {"score": [1, 2]}, "12", b"no json", b"[1, NaN]", b"[1, 1e999]", b"[" * 10**5]
)
def test_an_answer_that_is_no_list_of_scores_is_an_error(serve, given):
    service = serve(lambda body, place: (200, given))
    with pytest.raises(PluginError, match="did not answer a list of 2 numbers or nulls"):
        scores(service, "a", "b")


def test_a_secret_comes_from_a_file_and_is_not_repeated(serve, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cr3t-value\n")
    service = serve(lambda body, place: (401, {"got": "Bearer s3cr3t-value"}))
    with pytest.raises(PluginError) as caught:
        scores(
            service, "a", secret_headers={"Authorization": str(token), "X-Key": str(token)}, headers={"X-Plain": "1"}
        )
    assert "s3cr3t" not in str(caught.value) and "[redacted]" in str(caught.value)
    sent = service.headers[0]
    assert (sent["Authorization"], sent["X-Key"], sent["X-Plain"]) == ("Bearer s3cr3t-value", "s3cr3t-value", "1")
    with pytest.raises(ConfigError, match="The value of the header X-Key cannot be read"):
        Http(Http.Config(url=service.url, secret_headers={"X-Key": str(tmp_path / "none")}))


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert scores(serve(lengths), "abcd") == [4]


def test_vllms_endpoints_get_the_conversation(serve, tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")

    def classify(body, place):
        value = len(body["messages"][-1]["content"])
        return 200, {"data": [{"index": 0, "label": None, "probs": [0.0, float(value)], "num_classes": 2}]}

    service = serve(classify)
    images = (ImageRef("h", 1, 1, str(tmp_path / "a.png")),)
    given = rollouts("abc", "d", images=images, content="See <image> this")
    options = {"api": "classify", "output": 1, "model": "rm"}
    assert scores(service, given=given, **options) == [3, 1]
    assert service.requests[0]["model"] == "rm"
    turns = {body["messages"][-1]["content"]: body["messages"] for body in service.requests}
    assert turns["abc"] == [
        {"role": "user", "content": "See  this"}, {"role": "assistant", "content": "abc"}
    ]  # fmt: skip
    scores(service, given=given[:1], send_images=True, **options)
    (user, _) = service.requests[-1]["messages"]
    url = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert user["content"] == [
        {"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": " this"},
    ]  # fmt: skip
    pooling = serve(lambda body, place: (200, {"data": [{"index": 0, "data": [[0.5], [-1.5]]}]}))
    assert scores(pooling, "abc", api="pooling") == [-1.5]
    with pytest.raises(PluginError, match="did not answer"):
        scores(pooling, "abc", api="pooling", output=4)


def test_vllms_own_request_types_accept_what_is_sent(serve):
    protocol = pytest.importorskip("vllm.entrypoints.pooling.classify.protocol")
    from pydantic import TypeAdapter
    from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest

    service = serve(lambda body, place: (200, {"data": [{"probs": [1.0], "data": [1.0]}]}))
    scores(service, "abc", api="classify")
    scores(service, "abc", api="pooling")
    request = TypeAdapter(protocol.ClassificationRequest).validate_python(service.requests[0])
    assert type(request) is protocol.ClassificationChatRequest
    assert request.use_activation is False and not request.add_generation_prompt and not request.model_extra
    pooling = PoolingChatRequest.model_validate(service.requests[1])
    assert pooling.task == "token_classify" and not pooling.model_extra


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:80/x"}, "not an http or https address"),
        ({"url": "http://u:p@host/x"}, "no user or password"),
        ({"url": "http://h/x", "model": "m"}, "for api: classify"),
        ({"url": "http://h/x", "api": "pooling", "columns": ["a"]}, "sends no columns"),
        ({"url": "http://h/x", "concurrency": 0}, "concurrency"),
        ({}, "url"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValidationError, match=message):
        Http.Config(**options)


def test_the_worker_asks_the_service(serve):
    service = serve(lengths)
    given = rollouts("a", "bb", "ccc")
    with Scorer([RewardSpec(name="http", url=service.url)], workers=1) as scorer:
        scored = scorer.submit(RolloutGroup(given[0].prompt, tuple(given))).result(60)
    assert scored.rewards.tolist() == [1, 2, 3]
