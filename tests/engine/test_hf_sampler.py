"""The sampler without vLLM: the same distribution, the same rules for ends, seeds and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.hf_sampler import HFSampler
from mmrl.engine.policy import load_policy
from mmrl.engine.vision import ImageInputs
from mmrl.engine_api import SamplingRequest
from mmrl.types import Rollout

TEMPERATURE = 0.8


@dataclass
class Sampling:
    """A sampler and the bench that it samples from."""

    bench: Any
    sampler: HFSampler

    def __call__(self, index: int, *, n: int = 4, temperature: float = TEMPERATURE, seed: int = 5) -> list[Rollout]:
        request = SamplingRequest(self.bench.prompts[index], n, temperature, 16, seed)
        ((_, group),) = self.sampler.generate([request])
        return list(group.rollouts)


@pytest.fixture(scope="module")
def sampling(bench: Callable[[str], Any]) -> Callable[[str], Sampling]:
    def build(family: str) -> Sampling:
        setting = bench(family)
        images = ImageInputs(setting.folder, setting.media)
        return Sampling(setting, HFSampler(setting.folder, images, device="cpu", dtype="float32"))

    return build


@pytest.fixture(scope="module")
def vision_sampling(sampling) -> Sampling:
    return sampling("qwen2_5_vl")


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "qwen2", "llama"])
def test_its_logprobs_are_those_of_plain_transformers(family, sampling, plain):
    one = sampling(family)
    reference = plain(one.bench.folder.path)
    for index in range(len(one.bench.prompts)):
        for rollout in one(index, n=2):
            expected = reference.logprobs(rollout, one.bench.media).detach()
            np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_prompt_goes_through_the_model_once_for_its_group_whatever_came_before(family, sampling, monkeypatch):
    one = sampling(family)
    alone = tokens(one(0))
    model, tower = one.sampler._model, one.sampler._model.base_model.visual
    rows: list[tuple[int, int]] = []
    images: list[int] = []
    hooks = [
        model.base_model.language_model.register_forward_pre_hook(
            lambda _, args, kwargs: rows.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
        ),
        tower.register_forward_pre_hook(
            lambda _, args, kwargs: images.append(len(kwargs["grid_thw"])), with_kwargs=True
        ),
    ]
    first = tokens(one(2))
    for hook in hooks:
        hook.remove()
    length = len(one.bench.prompts[2].token_ids)
    assert rows[:2] == [(1, length - 1), (4, 1)] and set(rows[1:]) == {(4, 1)}
    assert images == [2]
    assert tokens(one(0)) == alone  # the images' positions are not those of the next prompt
    assert tokens(one(2)) == first


def test_the_same_seed_gives_the_same_tokens_and_another_does_not(vision_sampling):
    state = torch.random.get_rng_state()
    first = tokens(vision_sampling(1))
    torch.rand(7)
    assert tokens(vision_sampling(1)) == first
    assert tokens(vision_sampling(1, seed=6)) != first
    assert len({tuple(ids) for ids in first}) == 4
    torch.random.set_rng_state(state)


def test_sampling_leaves_the_global_random_numbers_alone(vision_sampling):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    vision_sampling(0)
    assert torch.equal(torch.rand(2), expected)


def test_an_eos_ends_a_completion_and_nothing_follows(vision_sampling):
    rollouts = vision_sampling(0, n=192)
    eos = set(vision_sampling.bench.folder.vocabulary.eos)
    ends = set()
    for rollout in rollouts:
        *before, last = rollout.token_ids.tolist()
        assert not eos & set(before)
        assert len(rollout.sampler_logprobs) == len(rollout.token_ids)
        if rollout.finish_reason == "stop":
            ends.add(last)
        else:
            assert last not in eos and len(rollout.token_ids) == 16
    assert ends == eos


def test_no_banned_id_is_sampled(vision_sampling):
    banned = set(vision_sampling.bench.folder.vocabulary.banned)
    assert not banned & {token for rollout in vision_sampling(1, n=192) for token in rollout.token_ids.tolist()}


def test_greedy_is_the_argmax(vision_sampling, plain):
    folder, media = vision_sampling.bench.folder, vision_sampling.bench.media
    (rollout,) = vision_sampling(2, n=1, temperature=0.0)
    images = [media.load(ref) for ref in rollout.images]
    table = plain(folder.path).distribution(rollout.prompt.text, images, rollout.token_ids.tolist())
    assert table[:-1].argmax(1).tolist() == rollout.token_ids.tolist()


def test_loaded_weights_are_the_ones_that_sample(sampling, plain, tmp_path):
    one = sampling("qwen2_5_vl")
    folder = one.bench.folder
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=TEMPERATURE)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    before = tokens(one(1))
    one.sampler.load(policy.named_weights(torch.float32), 7)
    rollouts = one(1)
    assert tokens(rollouts) != before
    assert {rollout.weight_version for rollout in rollouts} == {7}
    policy.model.save_pretrained(tmp_path)
    folder.save_files(tmp_path)
    reference = plain(tmp_path)
    for rollout in rollouts:
        expected = reference.logprobs(rollout, one.bench.media).detach()
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4)


def test_weights_that_lack_one_are_refused(sampling):
    one = sampling("qwen2")
    policy = load_policy(one.bench.folder, "cpu", "float32", freeze=(), temperature=1.0)
    incomplete = [item for item in policy.named_weights(torch.float32) if item[0] != "lm_head.weight"]
    with pytest.raises(AssertionError, match=r"not sent: \['lm_head.weight'\]"):
        one.sampler.load(incomplete, 1)
