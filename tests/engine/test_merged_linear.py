"""Adapters in bfloat16: the learner computes with the rounded weights that the sampler gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.aids.exporting import write_merged
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.adapters import attach
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.merged_linear import Kept, MergedLinear, merged
from mmrl.engine.network.plain_model import copy_weights
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.quantization import QuantizedLinear, whole
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.weights import Failures, save_adapter
from mmrl.ops.metrics import ADAPTER_KEPT
from tests.engine.test_adapters import rows_of

LENGTHS = (4, 19, 7, 3, 11, 24, 6)
LORA = LoraConfig(rank=4, alpha=6, targets=("language", "vision", "projector"))


class One(torch.nn.Module):
    """A model of one layer, as large as peft asks for."""

    dtype = torch.bfloat16

    def __init__(self, *, packed: bool, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = torch.nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)
        self.layer = QuantizedLinear(linear, torch.bfloat16) if packed else linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows)
        return found


def young(adapted: Any, size: float) -> None:
    """Give every B elements of one size, as AdamW's first step does."""
    generator = torch.Generator().manual_seed(1)
    for adapter in adapted:
        b = adapter.factors["lora_B.weight"]
        b.data.copy_(size * torch.randn(b.shape, generator=generator).sign())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_is_that_of_the_rounded_sum_and_its_gradient_goes_through_the_rounding(packed, checkpointed):
    from torch.utils.checkpoint import checkpoint

    model = One(packed=packed)
    (adapter,) = attach(model, ["layer"], LoraConfig(rank=4, alpha=6), seed=0)
    young([adapter], 0.01)
    assert isinstance(model.layer, MergedLinear) and model.layer.weight is model.layer.base_layer.weight
    a, b = adapter.factors.values()
    base, bias = whole(model.layer.base_layer), model.layer.base_layer.bias
    exact = base.double() + 1.5 * b.detach().double() @ a.detach().double()
    rounded = exact.to(torch.bfloat16)
    rows = torch.randn(2, 30, 64).to(torch.bfloat16).requires_grad_()
    gradient = torch.randn(2, 30, 48).to(torch.bfloat16)
    found = checkpoint(model, rows, use_reentrant=False) if checkpointed else model(rows)
    assert torch.equal(found, torch.nn.functional.linear(rows, rounded, bias))
    found.backward(gradient)
    of_weight = gradient.double().flatten(0, 1).T @ rows.detach().double().flatten(0, 1)
    assert torch.equal(rows.grad, gradient @ rounded)
    for factor, expected in (
        (a, 1.5 * b.detach().double().T @ of_weight),
        (b, 1.5 * of_weight @ a.detach().double().T),
    ):
        assert float((factor.grad - expected).norm()) < 5e-3 * float(expected.norm())
    adapter.layer.enable_adapters(False)
    assert torch.equal(model(rows), torch.nn.functional.linear(rows, base, bias))


def test_the_share_that_is_kept_is_that_of_the_changes_that_reach_the_next_number():
    """In bfloat16, 1 is followed by 1 + 2^-7: of 2^-9 nothing is kept, and 3 x 2^-9 is rounded up to 4 x 2^-9."""
    weight, a = torch.ones(3, 1, dtype=torch.bfloat16), torch.full((1, 1), 0.5)
    b = torch.tensor([[2.0**-8], [3 * 2.0**-8], [0.0]])
    kept = Kept()
    found = merged(weight, a, b, 1.0, torch.bfloat16, kept)
    assert found.flatten().tolist() == [1, 1 + 2.0**-7, 1]
    assert kept.share == pytest.approx((3 * 4) / (1 + 9))
    other = Kept()
    merged(weight, a, 0 * b, 1.0, torch.bfloat16, other)
    assert other.share is None and Kept().share is None


def flat(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in policy.named_weights(torch.bfloat16)}


@pytest.mark.parametrize("size", [2e-5, 1e-3])
@pytest.mark.parametrize("quantize", [False, True], ids=["lora", "nf4"])
def test_a_young_adapter_makes_one_policy_of_learner_and_sampler(quantize, size, vision, plain):
    """A policy without adapters that holds what is sent gives the same bits; gradients are those of float64."""
    options: dict[str, Any] = {"freeze": (), "temperature": 0.8}
    policy = load_policy(vision.folder, "cpu", "bfloat16", lora=LORA, quantize=quantize, **options)
    before = flat(policy)
    young(policy.adapted, size)
    sent, factors = flat(policy), {}
    for adapter in policy.adapted:
        name, (a, b) = f"{adapter.name}.weight", (each.detach().double() for each in adapter.factors.values())
        factors[name] = a, b
        exact = before[name].double() + 1.5 * b @ a
        assert torch.equal(sent[name], exact.float().to(torch.bfloat16)), name
    changed = sum(int((sent[name] != before[name]).sum()) for name in factors)
    assert {2e-5: 0.01, 1e-3: 0.7}[size] < changed / sum(sent[name].numel() for name in factors)
    samples = vision.samples(LENGTHS)
    images = ImageInputs(vision.folder, vision.media)
    advantages = torch.cat([torch.full((n,), (-1.0) ** i * n) for i, n in enumerate(LENGTHS)]) / 999
    other = load_policy(vision.folder, "cpu", "bfloat16", **options)
    copy_weights(other.model, sent.items())
    found = []
    for each in (policy, other):
        logprobs, _ = each(Collator(vision.folder, each.model.base_model, images, "cpu", torch.bfloat16)(samples))
        (advantages * logprobs).sum().backward()
        found.append(logprobs.detach())
    assert torch.equal(*found)
    reference = plain(vision.folder.path, "float64")
    reference.model.load_state_dict(sent)
    values = torch.cat([reference.logprobs(sample, vision.media, 0.8) for sample in samples])
    (advantages.double() * values).sum().backward()
    of_weights = dict(reference.model.named_parameters())
    wrong, norm = 0.0, 0.0
    for adapter in policy.adapted:
        name = f"{adapter.name}.weight"
        (a, b), of_weight = factors[name], of_weights[name].grad
        expected = (1.5 * b.T @ of_weight, 1.5 * of_weight @ a.T)
        for factor, wanted in zip(adapter.factors.values(), expected, strict=True):
            wrong, norm = wrong + float((factor.grad - wanted).square().sum()), norm + float(wanted.square().sum())
    assert norm > 0 and wrong < 0.015**2 * norm


def test_each_sync_tells_what_the_sampler_has_got_and_the_learner_computes_with_it(start, vision):
    model = {"dtype": "bfloat16", "lora": LORA.model_dump()}
    engine = start(with_sampler=True, sampler={"name": "hf"}, model=model, learner={"lr": 2e-5, "zero_stage": 3})
    rows = rows_of(vision)
    with engine.sampling():
        pass
    with engine.learning() as learner:
        assert ADAPTER_KEPT not in learner.network("policy").update(rows).metrics  # B was zero
        kept = Kept()
        for _ in learner.policy.named_weights(torch.bfloat16, kept=kept):
            pass
    with engine.sampling():
        pass
    with engine.learning() as learner:
        told = learner.network("policy").update(rows).metrics[ADAPTER_KEPT]
    assert told == kept.share and 0.05 < told < 0.5


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["stored as float32", "stored as bfloat16"])
def test_an_export_of_an_adapter_in_bfloat16_is_what_its_run_has_sampled_with(as_on_hub, bench, tmp_path):
    folder, lora = bench("qwen2", as_on_hub).folder, LoraConfig(rank=2, targets=("language",))
    policy = load_policy(folder, "cpu", "bfloat16", freeze=(), temperature=1.0, lora=lora)
    young(policy.adapted, 1e-4)
    failures = Failures()
    save_adapter(lora, policy, folder, tmp_path / "adapter", failures)
    assert failures.first is None
    (tmp_path / "whole").mkdir()
    write_merged(tmp_path / "adapter", tmp_path / "whole")
    written = ModelFolder.open(str(tmp_path / "whole"))
    found = load_policy(written, "cpu", "float32", freeze=(), temperature=1.0)
    expected = flat(policy)
    assert written.config.dtype == torch.bfloat16
    for name, weight in found.named_weights(torch.float32):
        np.testing.assert_array_equal(weight.numpy(), expected[name].float().numpy(), err_msg=name)
