"""Samplers score tokens that are there already as if they had sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.engine.sampler.one_token import one_token_requests
from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import EncodedPrompt, Prompt, Rollout, Sample, Segment
from tests.proofs import families

TEMPERATURE = 0.8


def gap(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def sampled(engine: Any, prompts: Sequence[EncodedPrompt]) -> list[Rollout]:
    requests = [SamplingRequest(prompt, 2, TEMPERATURE, 16, 77 << number) for number, prompt in enumerate(prompts)]
    with engine.sampling() as sampler:
        groups = dict(sampler.generate(requests))
        sampler.forget_prompts()
    return [rollout for index in range(len(requests)) for rollout in groups[index].rollouts]


def scored(engine: Any, samples: Sequence[Sample], temperature: float = TEMPERATURE) -> list[np.ndarray]:
    with engine.sampling() as sampler:
        (of_rank,) = sampler.score(samples, temperature)
    assert all(values.dtype == np.float32 for values in of_rank)
    return of_rank


def update(engine: Any, rollouts: Sequence[Rollout]) -> None:
    masks = [rollout.mask for rollout in rollouts]
    advantages = [np.full(len(mask), (-1.0) ** index) for index, mask in enumerate(masks)]
    args = rollouts, masks, {"advantages": advantages}, np.arange(len(masks)), Aggregation("token-mean")
    with engine.learning() as learner:
        learner.network("policy").update(list(training_rows(*args, range(len(masks))).values()))


def learned(engine: Any, samples: Sequence[Sample]) -> list[np.ndarray]:
    with engine.learning() as learner:
        return learner.network("policy").score(samples)


def test_each_token_of_the_policy_has_a_request_that_ends_just_before_it():
    prompt = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.array([1, 2], np.int32), images=())
    parts = ((3, 4), True), ((5,), False), ((6,), True)
    segments = tuple(Segment(np.array(ids, np.int32), own, np.zeros(len(ids), np.float32)) for ids, own in parts)
    found = {place: r.token_ids.tolist() for place, r in one_token_requests(Sample(prompt, segments), 0.5)}
    assert found == {0: [1, 2], 1: [1, 2, 3], 3: [1, 2, 3, 4, 5]}
    ((_, first), *_) = one_token_requests(Sample(prompt, segments), 0.5)
    assert (first.num_samples, first.temperature, first.max_new_tokens, first.segments) == (1, 0.5, 1, ())


def test_vllm_scores_what_it_has_sampled_with_what_it_told(engine, vision):
    rollouts = sampled(engine, vision.prompts)
    assert any(rollout.prompt.images for rollout in rollouts)
    assert gap(scored(engine, rollouts), [rollout.sampler_logprobs for rollout in rollouts]) < 1e-6
    update(engine, rollouts)
    now = scored(engine, rollouts)
    assert gap(now, [rollout.sampler_logprobs for rollout in rollouts]) > 1e-2  # of other weights
    assert gap(now, learned(engine, rollouts)) < 1e-4
    assert gap(scored(engine, rollouts, 0.4), now) > 1e-1


def test_vllm_scores_episodes_with_images_in_observations(engine, vision):
    episodes = [each for each in vision.episodes() if len(each.all_images) <= 2]  # as many as this vLLM takes
    assert any(segment.images for each in episodes for segment in each.segments)
    found = scored(engine, episodes)
    assert gap(found, learned(engine, episodes)) < 1e-4
    assert all((values[~each.mask] == 0).all() for values, each in zip(found, episodes, strict=True))


def test_vllm_scores_the_same_tokens_under_another_image(engine, vision, picture):
    rollouts = [rollout for rollout in sampled(engine, vision.prompts[1:2]) if rollout.prompt.images]
    other = vision.encoder.encode(replace(vision.prompts[1].prompt, images=(picture(56, 56, 5),)))
    crossed = [Sample(other, rollout.segments) for rollout in rollouts]
    assert other.images[0].hash != vision.prompts[1].images[0].hash
    own, moved = scored(engine, rollouts), scored(engine, crossed)
    assert gap(own, moved) > 1e-3
    assert gap(moved, learned(engine, crossed)) < 1e-4


def test_vllm_samples_after_scoring_as_if_nothing_had_been_scored(engine, vision):
    request = SamplingRequest(vision.prompts[1], 3, TEMPERATURE, 16, 5)

    def tokens(sampler: Any) -> list[list[int]]:
        ((_, group),) = sampler.generate([request])
        return [rollout.token_ids.tolist() for rollout in group.rollouts]

    with engine.sampling() as sampler:
        before = tokens(sampler)
    with engine.sampling() as sampler:
        sampler.score(vision.samples([5, 4]), TEMPERATURE)
        assert sampler.admissions.step == 0 and tokens(sampler) == before
        broken = vision.samples([6])[0]
        too_long = Sample(broken.prompt, broken.segments * 200)
        with pytest.raises(Exception, match="longer than"):
            sampler.score([broken, too_long], TEMPERATURE)
    with engine.sampling() as sampler:  # what was left is given up
        assert tokens(sampler) == before


@pytest.mark.parametrize("family", families("hf"))
def test_the_sampler_without_vllm_scores_what_it_has_sampled_with_what_it_told(family, bench, start):
    setting = bench(family)
    engine = start(with_sampler=True, bench=setting, sampler={"name": "hf"}, learner={"lr": 2e-3})
    rollouts = sampled(engine, setting.prompts)
    assert gap(scored(engine, rollouts), [rollout.sampler_logprobs for rollout in rollouts]) < 1e-5
    update(engine, rollouts)
    assert gap(scored(engine, rollouts), learned(engine, rollouts)) < 1e-4


def test_the_sampler_without_vllm_scores_episodes(vision, start):
    engine = start(with_sampler=True, sampler={"name": "hf"})
    episodes = [*vision.episodes(), vision.episode(0, ("The environment failed at once.", []))]
    found = scored(engine, episodes)
    assert gap(found[:-1], learned(engine, episodes[:-1])) < 1e-4
    assert not found[-1].any() and len(found[-1]) == len(episodes[-1].token_ids)
