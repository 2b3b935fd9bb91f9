"""Completions that vLLM begins with some weights and ends with others, cut at any token, are exact on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.engine_api import Cut, Finished, Polled, Sampler, SamplingRequest
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import EncodedPrompt, Message, Prompt, Rollout
from tests.engine import episodes

TEMPERATURE = 0.8
TOKENS = 12


def request(prompt: EncodedPrompt, seed: int, tokens: int = TOKENS) -> SamplingRequest:
    return SamplingRequest(prompt, 1, TEMPERATURE, tokens, seed << 16, may_be_cut=True)


def until_stop(sampler: Sampler, steps: int) -> list[Finished]:
    """Whatever is finished in so many steps; nothing is answered."""
    sampler.stop_after(steps, 0)
    finished = list[Finished]()
    while not (news := sampler.poll()).stopped:
        assert not news.waits
        finished += news.finished
    assert sampler.poll() == Polled(stopped=True)
    return finished


def ended(sampler: Sampler, requests: Sequence[SamplingRequest]) -> list[Rollout]:
    groups = dict(sampler.generate(requests))
    return [groups[index].rollouts[0] for index in range(len(requests))]


@pytest.fixture
def update(engine: Any, vision: Any, tmp_path: Path, plain: Any) -> Callable[[str], Any]:
    """Take an optimizer step on random completions; plain transformers with the weights that it leaves."""

    def step(name: str) -> Any:
        samples = vision.samples([6, 6, 6], seed=len(name))
        masks = [sample.mask for sample in samples]
        advantages = [np.full(len(mask), 1.0 - place) for place, mask in enumerate(masks)]
        aggregation = Aggregation("token-mean")
        rows = training_rows(samples, masks, {"advantages": advantages}, np.arange(3), aggregation, range(3))
        with engine.learning() as learner:
            learner.network("policy").update(list(rows.values()))
            learner.save(tmp_path / name)
        return plain(tmp_path / name / "model")

    return step


@pytest.fixture(scope="module")
def prompts(vision: Any) -> list[EncodedPrompt]:
    """Text, one of them of several blocks of vLLM's cache, and two images."""
    long = vision.encoder.encode(Prompt("long", (Message("user", "7+8? " * 45),)))
    assert len(long.token_ids) > 128
    return [vision.prompts[0], vision.prompts[2], long]


def test_members_that_are_asked_one_by_one_have_the_tokens_of_their_group(engine, vision):
    for prompt in vision.prompts:
        group = replace(request(prompt, 3), num_samples=4, may_be_cut=False)
        members = [replace(group, num_samples=1, seed=group.seed + i, may_be_cut=True) for i in range(4)]
        with engine.sampling() as sampler:
            ((_, together),) = sampler.generate([group])
            alone = ended(sampler, members)
        assert [r.token_ids.tolist() for r in alone] == [r.token_ids.tolist() for r in together.rollouts]
        assert [r.text for r in alone] == [r.text for r in together.rollouts]
        for one, other in zip(alone, together.rollouts, strict=True):
            np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5)


def test_a_completion_that_is_cut_at_any_token_goes_on_with_other_weights_as_a_fresh_request(
    engine, vision, prompts, update
):
    before = update("before")
    asked = [request(prompt, 11 + place) for place, prompt in enumerate(prompts)]
    cuts = dict[tuple[int, int], SamplingRequest]()
    with engine.sampling() as sampler:
        whole = ended(sampler, asked)
        assert [len(rollout.token_ids) for rollout in whole] == [TOKENS] * len(asked)
        for offset in range(1, TOKENS):
            first = sampler.submit(asked)[0]
            assert until_stop(sampler, offset) == []
            cuts |= {(each.ticket - first, offset): each.request for each in sampler.cut()}
    assert len(cuts) == len(asked) * (TOKENS - 1)
    for (place, offset), cut in cuts.items():
        (segment,) = cut.segments
        assert segment.token_ids.tolist() == whole[place].token_ids[:offset].tolist()
        assert np.array_equal(segment.sampler_logprobs, whole[place].sampler_logprobs[:offset])
        assert (cut.max_new_tokens, segment.weight_version) == (TOKENS - offset, whole[place].weight_version)
    after = update("and after")
    going_on = [replace(cut, seed=(100 + place) << 16) for place, cut in enumerate(cuts.values())]
    fresh = [
        replace(each, prompt=replace(each.prompt, token_ids=each.token_ids), segments=(), may_be_cut=False)
        for each in going_on
    ]
    with engine.sampling() as sampler:
        rollouts = ended(sampler, going_on)
        sampler.forget_prompts()
        others = ended(sampler, fresh)
    for (place, offset), rollout, other in zip(cuts, rollouts, others, strict=True):
        first, second = rollout.segments
        assert second.token_ids.tolist() == other.token_ids.tolist()
        assert second.continues and second.weight_version == first.weight_version + 1 == rollout.weight_version
        assert rollout.text == vision.folder.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        stops = rollout.token_ids[-1] in vision.folder.vocabulary.eos
        assert rollout.finish_reason == ("stop" if stops else "length") and (stops or len(rollout.token_ids) == TOKENS)
        old, new = (episodes.whole_logprobs(reference, rollout, vision.media) for reference in (before, after))
        expected = np.where(np.arange(len(old)) < offset, old, new)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4, err_msg=f"{place} at {offset}")
        assert np.abs(old - new)[offset:].max() > 1e-3  # the other weights would be noticed


def test_a_turn_of_an_episode_that_is_cut_twice_goes_on_with_its_images(engine, vision, picture, update):
    observation = episodes.inserted(vision, "Look again.", picture(90, 60))
    beside = request(vision.prompts[2], 9)
    references = [update("v")]
    turn = replace(request(vision.prompts[1], 5, 3), answered_after=2)
    with engine.sampling() as sampler:
        sampler.submit([turn])
        (rollout,) = sampler.poll().finished[0].group.rollouts
    goes_on = replace(turn, segments=(*rollout.segments, observation), max_new_tokens=10)
    for number in (1, 2):
        references.append(update("w" * number))
        with engine.sampling() as sampler:
            sampler.submit([replace(goes_on, seed=number << 16), beside])
            assert until_stop(sampler, 3) == []
            goes_on, _ = (each.request for each in sampler.cut())
    references.append(update("www"))
    with engine.sampling() as sampler:
        sampler.submit([replace(goes_on, seed=3 << 16)])
        (rollout,) = sampler.poll().finished[0].group.rollouts
    segments, ends = rollout.segments, np.cumsum([len(s.token_ids) for s in rollout.segments])
    assert [s.by_policy for s in segments] == [True, False, True, True, True]
    assert [s.continues for s in segments] == [False, False, False, True, True]
    assert [s.finish_reason for s in segments] == ["length", None, None, None, rollout.finish_reason]
    own = rollout.token_ids[(rollout.turn_of_token == 1) & rollout.mask]
    assert rollout.text == vision.folder.tokenizer.decode(own, skip_special_tokens=True)
    for reference, place in zip(references, (0, 2, 3, 4), strict=True):
        segment = segments[place]
        expected = episodes.whole_logprobs(reference, rollout, vision.media)[: ends[place]][-len(segment.token_ids) :]
        np.testing.assert_allclose(segment.sampler_logprobs, expected, atol=1e-4)
        assert segment.weight_version == segments[0].weight_version + max(place - 1, 0)


def test_cut_requests_leave_nothing_behind_and_come_in_the_order_of_their_tickets(engine, vision):
    asked = [request(prompt, 20 + place, 9) for place, prompt in enumerate(vision.prompts)]
    with engine.sampling() as sampler:
        expected = [rollout.token_ids.tolist() for rollout in ended(sampler, asked)]
        sampler.submit([*asked, *(replace(each, max_new_tokens=2) for each in asked)])
        assert len(until_stop(sampler, 4)) == 3
        cuts: Sequence[Cut] = sampler.cut()
        assert [len(cut.request.segments[0].token_ids) for cut in cuts] == [4, 4, 4]
        assert [cut.ticket for cut in cuts] == sorted(cut.ticket for cut in cuts)
        assert not engine._sampler._llm.llm_engine.has_unfinished_requests() and sampler.poll() == Polled()
        assert [rollout.token_ids.tolist() for rollout in ended(sampler, asked)] == expected
