"""Mixtures of experts: what routers choose, what experts give, and the load that they share."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.cluster.shipping import PackedGroup, PackedSamples
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.experts import grouped, imbalances, rerouted
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.vision import ImageInputs, idle_sample
from mmrl.engine.sampler.hf_sampler import HFSampler
from mmrl.engine_api import SamplingRequest
from mmrl.types import RolloutGroup, Sample

MIXTURES = [name for name, family in FAMILIES.items() if family.mixture]
LENGTHS = (5, 17, 9, 1, 12, 6, 21)


@pytest.fixture
def build(bench: Callable[..., Any]) -> Callable[..., tuple[Any, Policy, Callable[..., Collator]]]:
    """A family's bench, policy, and collators with options."""

    def load(family: str, dtype: str = "float32", **options: Any) -> tuple[Any, Policy, Callable[..., Collator]]:
        setting = bench(family)
        policy = load_policy(setting.folder, "cpu", dtype, freeze=(), temperature=1.0, **options)
        images, body = ImageInputs(setting.folder, setting.media), policy.model.base_model

        def collator(**wishes: Any) -> Collator:
            return Collator(setting.folder, body, images, "cpu", getattr(torch, dtype), **wishes)

        return setting, policy, collator

    return load


def sampled(setting: Any, dtype: str = "float32") -> list[Sample]:
    """Rollouts of each prompt that know their experts."""
    images = ImageInputs(setting.folder, setting.media)
    sampler = HFSampler(setting.folder, images, device="cpu", dtype=dtype, records_experts=True)
    requests = [SamplingRequest(prompt, 3, 1.0, 12, 5 + 10 * i) for i, prompt in enumerate(setting.prompts)]
    return [rollout for _, group in sampler.generate(requests) for rollout in group.rollouts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_plain_transformers_in_the_same_bits_each_time(build, dtype):
    _, policy, _ = build("qwen3_moe", str(dtype).removeprefix("torch."))
    experts, threads = policy.model.model.layers[0].mlp.experts, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    hidden_SH = torch.randn(700, 128, generator=generator).to(dtype).requires_grad_()
    weights_SK, chosen_SK = torch.rand(700, 8, generator=generator).topk(2)
    chosen_SK[chosen_SK == 3] = 4  # an expert without a token
    weights_SK.requires_grad_()
    wanted = (hidden_SH, weights_SK, experts.gate_up_proj, experts.down_proj)

    def found(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        output_SH = function(hidden_SH, chosen_SK, weights_SK)
        scales_H = torch.linspace(-1, 1, 128)
        return [output_SH.detach(), *torch.autograd.grad((output_SH.float() * scales_H).sum(), wanted)]

    try:
        torch.set_num_threads(2)
        own = [found(lambda *inputs: grouped(experts, *inputs)) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    policy.model.set_experts_implementation("eager")
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for ours, again, last, theirs in zip(*own, found(experts), strict=True):
        assert torch.equal(ours, again) and torch.equal(ours, last)
        assert float((ours - theirs).norm()) < tolerance * float(theirs.norm())
    assert not own[0][3][3].any()


def test_a_router_computes_in_float32_whatever_the_models_type(build):
    _, policy, _ = build("qwen3_moe", "bfloat16")
    router = policy.routers[0]
    hidden_SH = torch.randn(50, 128).bfloat16()
    logits_SE, weights_SK, chosen_SK = router(hidden_SH)
    expected_SE = hidden_SH.double() @ router.weight.double().T
    np.testing.assert_allclose(logits_SE.detach(), expected_SE.detach(), atol=1e-6)
    values = expected_SE.softmax(-1).topk(2)
    assert torch.equal(chosen_SK, values.indices)
    expected_SK = values.values / values.values.sum(-1, keepdim=True)
    np.testing.assert_allclose(weights_SK.detach(), expected_SK.detach(), atol=1e-6)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_imbalance_of_a_sample_is_transformers_load_balancing_loss_however_it_is_packed(family, build):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    setting, policy, collator = build(family)
    samples = setting.samples(LENGTHS)
    logits: list[torch.Tensor] = []
    for router in policy.routers:
        router.register_forward_hook(lambda _, inputs, outputs: logits.append(outputs[0]))
    expected = []
    for sample in samples:
        logits.clear()
        policy(collator()([sample]))
        expected.append(torch.stack([load_balancing_loss_func((layer,), 8, 2) for layer in logits]).mean())
    torch.stack(expected).mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    floor = 1e-7 * max(float(gradient.norm()) for gradient in gradients.values())
    for share in (True, False):
        policy.zero_grad()
        policy(collator(balances=True, share=share)([*samples, idle_sample(setting.folder)]))
        found_N = imbalances(policy.routers)[: len(samples)]
        np.testing.assert_allclose(found_N.detach(), torch.stack(expected).detach(), rtol=1e-5)
        found_N.mean().backward()
        for name, parameter in policy.model.named_parameters():
            if name in gradients:
                bound = max(1e-4 * gradients[name].norm(), floor)
                assert (parameter.grad - gradients[name]).norm() < bound, name


def test_checkpointing_changes_no_gradient_of_the_routers_loss(build):
    setting, policy, collator = build("qwen3_moe")
    inputs, found = collator(balances=True)(setting.samples(LENGTHS)), []
    policy.train()
    for checkpointing in (False, True):
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.zero_grad()
        logprobs_T, _ = policy(inputs)
        (logprobs_T.mean() + imbalances(policy.routers).sum()).backward()
        found.append([p.grad.clone() for p in policy.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("family", MIXTURES)
def test_the_sampler_knows_the_experts_that_the_learner_chooses(family, build):
    setting, policy, collator = build(family)
    samples = sampled(setting)
    for sample in samples:
        assert sample.experts.shape == (sample.num_tokens - 1, 2, 2) and sample.experts.max() < 8
    inputs = collator()(samples)
    policy(inputs)
    tokens_T, layers_T = rerouted(policy.routers, inputs.predicting)
    assert len(tokens_T) == sum(len(sample.mask) for sample in samples)
    assert not tokens_T.any() and not layers_T.any()


def test_replayed_experts_are_used_with_the_learners_own_weights(build):
    setting, policy, collator = build("qwen3_moe")
    *others, last = sampled(setting)
    for sample in others:
        sample.experts[:, 0] = (0, 5)
    samples = [*others, replace(last, experts=None)]
    used: list[torch.Tensor] = []
    for router in policy.routers:
        router.register_forward_hook(lambda _, inputs, outputs: used.append(outputs[2]))
    inputs = collator(replays=True, share=False)(samples)
    known_S, count = inputs.routing.recorded_OLK[:, 0, 0] >= 0, len(last.mask)
    assert int(known_S.sum()) == sum(sample.num_tokens - 1 for sample in others)
    with torch.no_grad():
        compared_T, _ = policy(collator(share=False)(samples))
        assert not (used[0][known_S] == torch.tensor([0, 5])).all(1).all()
        used.clear()
        replayed_T, _ = policy(inputs)
    assert all(torch.equal(chosen[known_S], inputs.routing.recorded_OLK[known_S, i]) for i, chosen in enumerate(used))
    assert (replayed_T - compared_T)[:-count].abs().max() > 1e-4
    np.testing.assert_allclose(replayed_T[-count:], compared_T[-count:], atol=1e-5)
    tokens_T, layers_T = rerouted(policy.routers, inputs.predicting)
    assert tokens_T[:-count].float().mean() > 0.5 and 0 < layers_T.mean() < tokens_T.float().mean()
    assert not tokens_T[-count:].any()


def test_replay_closes_the_gap_that_other_experts_leave(build):
    setting, policy, collator = build("qwen3_moe")
    samples = sampled(setting)
    for router in policy.routers:  # near the sampler's, as if they were computed in another way
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
        router.weight.data += 0.1 * router.weight.data.std() * noise
    sampler_T = torch.from_numpy(np.concatenate([sample.sampler_logprobs for sample in samples]))
    gaps = []
    with torch.no_grad():
        for replays in (False, True):
            found_T, _ = policy(inputs := collator(replays=replays)(samples))
            gaps.append(float((found_T - sampler_T).abs().max()))
    assert rerouted(policy.routers, inputs.predicting)[0].any()
    assert gaps[1] < gaps[0] / 3


def test_experts_travel_with_samples_and_groups(build):
    setting, _, _ = build("qwen3_moe")
    samples = sampled(setting)
    mixed = [samples[0], replace(samples[1], experts=None), samples[2]]
    group = RolloutGroup(samples[0].prompt, tuple(mixed))
    back = pickle.loads(pickle.dumps(PackedSamples(mixed)))
    for arrived in (back, pickle.loads(pickle.dumps(PackedGroup(group.prompt, group.rollouts))).rollouts):
        assert [each.experts is None for each in arrived] == [False, True, False]
        np.testing.assert_array_equal(arrived[2].experts, samples[2].experts)


@pytest.mark.parametrize("share", [True, False])
def test_a_last_token_that_a_row_keeps_goes_where_the_routers_send_it(share, build):
    """A sampler tells of the experts of all tokens but the last one, which predicted nothing."""
    setting, policy, collator = build("qwen3_moe")
    samples = sampled(setting)
    plain = collator(replays=True, share=share)
    kept, short = plain.keeping_last()(samples), plain(samples)
    assert kept.last is not None and kept.routing.recorded_OLK is not None and short.routing.recorded_OLK is not None
    lost_S = (kept.routing.recorded_OLK < 0).all(-1).all(-1)
    assert (
        torch.equal(lost_S.nonzero()[:, 0], kept.last.positions.sort().values)
        and not (short.routing.recorded_OLK < 0).any()
    )
    assert torch.equal(kept.routing.recorded_OLK[~lost_S], short.routing.recorded_OLK)
    np.testing.assert_allclose(policy(kept)[0].detach(), policy(short)[0].detach(), atol=1e-5)
