"""The sampler without vLLM: the same distribution, the same rules for ends, seeds and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.sampler.hf_sampler import HFSampler
from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Rollout, TrainingRow
from tests.conftest import tower_passes
from tests.engine import episodes
from tests.engine.branches import assert_branches, play_branches
from tests.proofs import families

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


def rows_of(rollouts: list[Rollout]) -> list[TrainingRow]:
    """Rows whose advantages change their sign from one to the next."""
    masks = [rollout.mask for rollout in rollouts]
    advantages = [np.full(len(mask), (-1.0) ** index) for index, mask in enumerate(masks)]
    groups = np.arange(len(rollouts))
    return list(
        training_rows(rollouts, masks, {"advantages": advantages}, groups, Aggregation("token-mean"), groups).values()
    )


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.proves("hf")
@pytest.mark.parametrize("family", families("hf"))
def test_after_an_update_it_agrees_with_the_learner_and_plain_transformers(family, bench, start, plain, tmp_path):
    setting = bench(family)
    requests = [SamplingRequest(prompt, 2, TEMPERATURE, 16, seed) for seed, prompt in enumerate(setting.prompts)]
    rank = start(with_sampler=True, bench=setting, sampler={"name": "hf"}, learner={"lr": 2e-3})

    def sample() -> list[Rollout]:
        with rank.sampling() as sampler:
            return [rollout for _, group in sampler.generate(requests) for rollout in group.rollouts]

    def gap(rollouts: list[Rollout], logprobs: list[Any]) -> float:
        return max(np.abs(r.sampler_logprobs - own).max() for r, own in zip(rollouts, logprobs, strict=True))

    first = sample()
    with rank.learning() as learner:
        assert gap(first, learner.network("policy").score(first)) < 1e-4
        learner.network("policy").update(rows_of(first))
        assert gap(first, learner.network("policy").score(first)) > 1e-2  # the weights have moved
    second = sample()
    with rank.learning() as learner:
        assert gap(second, learner.network("policy").score(second)) < 1e-4
        learner.save(tmp_path)
    assert [rollout.weight_version for rollout in (first[0], second[0])] == [0, 1]
    reference = plain(tmp_path / "model")
    assert gap(second, [reference.logprobs(rollout, setting.media).detach().numpy() for rollout in second]) < 1e-4


@pytest.mark.parametrize("family", families("hf", "vision_once"))
def test_a_prompt_goes_through_the_model_once_for_its_group_whatever_came_before(family, sampling, monkeypatch):
    one = sampling(family)
    alone = tokens(one(0))
    model = one.sampler._model
    rows: list[tuple[int, int]] = []
    hook = model.base_model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
    )
    passes = tower_passes(model, one.bench.folder.family)
    first, seen = tokens(one(2)), [*passes]
    hook.remove()
    prompt, pixels = one.bench.prompts[2], ImageInputs(one.bench.folder, one.bench.media)
    length = len(prompt.token_ids)
    assert rows[:2] == [(1, length - 1), (4, 1)] and set(rows[1:]) == {(4, 1)}
    assert len(prompt.images) == 2 and seen == [sum(len(pixels(ref)[0]) for ref in prompt.images)]
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


def test_weights_that_lack_one_are_refused(sampling):
    one = sampling("qwen2")
    policy = load_policy(one.bench.folder, "cpu", "float32", freeze=(), temperature=1.0)
    incomplete = [item for item in policy.named_weights(torch.float32) if item[0] != "lm_head.weight"]
    with pytest.raises(AssertionError, match=r"not sent: \['lm_head.weight'\]"):
        one.sampler.load(incomplete, 1)


def test_turns_of_episodes_are_exact_and_the_same_whenever_they_are_answered(vision_sampling, plain, picture):
    setting, sampler = vision_sampling.bench, vision_sampling.sampler
    observations = [episodes.inserted(setting, "Look again."), episodes.inserted(setting, "So?", picture(90, 60))]
    beside = [SamplingRequest(setting.prompts[0], 2, TEMPERATURE, 6, 3)]
    alone = [group for _, group in sampler.generate(beside)]
    found = []
    for timing in ("early", "late", "random"):
        sampler.leave()
        found.append(episodes.play(sampler, setting.prompts[:2], observations, beside, timing))
    for other in found[1:]:
        episodes.assert_same(other, found[0])
    episodes.assert_exact(found[0], plain(setting.folder.path), setting.media)
    # A step samples all that was admitted, whatever its length.
    assert [each.steps for each in found[0].values()] == [((0, 0), (3, 3), (6, 6))] * 2 + [((0, 0),)]
    rollout = found[0][1].rollout
    assert [segment.by_policy for segment in rollout.segments] == [True, False, True, False, True]
    assert [len(segment.images) for segment in rollout.segments] == [0, 0, 0, 1, 0] and len(rollout.all_images) == 2
    for segment in rollout.segments[::2]:
        assert (segment.weight_version, segment.role) == (sampler.weight_version, "assistant")
        ends = int(segment.token_ids[-1]) in setting.folder.vocabulary.eos
        assert segment.finish_reason == ("stop" if ends else "length")
    last = setting.folder.tokenizer.decode(rollout.segments[-1].token_ids, skip_special_tokens=True)
    assert rollout.text == last and rollout.finish_reason == rollout.segments[-1].finish_reason
    (group,) = alone
    assert np.array_equal(found[0][2].rollout.token_ids, group.rollouts[0].token_ids)
    (segment,) = group.rollouts[0].segments
    assert segment.weight_version is None and segment.finish_reason is None


@pytest.mark.full
def test_episodes_that_branch_after_a_picture_are_exact(vision_sampling, plain, tmp_path):
    setting, sampler = vision_sampling.bench, vision_sampling.sampler
    sampler.leave()
    group = play_branches(sampler, setting.prompts[1], setting, tmp_path)
    assert_branches(group, plain(setting.folder.path), setting.media)
    sampler.leave()
    again = play_branches(sampler, setting.prompts[1], setting, tmp_path)
    assert tokens([*again.rollouts]) == tokens([*group.rollouts])
