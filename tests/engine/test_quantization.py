"""Weights in 4 bits beside adapters: values and gradients of a layer, and the real learner and sampler with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.aids.exporting import export_adapter, export_model
from mmrl.engine.network import adapters, quantization
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.quantization import QuantizedLinear
from mmrl.engine.network.sizes import quantized_sizes
from mmrl.engine_api import SamplingRequest
from mmrl.errors import ConfigError, ResourceError
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Sample, TrainingRow
from tests.conftest import TEMPERATURE
from tests.engine.adapted import held_to_reference, merged

LENGTHS = (4, 19, 7, 3, 11)
LORA = {"rank": 4, "alpha": 6, "targets": ["language", "vision"]}
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4 as in the paper's appendix E."""


@pytest.fixture(scope="module")
def rows(vision) -> list[TrainingRow]:
    """Rows of text, of one image and of two, in several micro-batches."""
    samples, count = vision.samples(LENGTHS), len(LENGTHS)
    masks, advantages = [sample.mask for sample in samples], [np.full(n, (-1.0) ** n * n / 9) for n in LENGTHS]
    aggregation = Aggregation("token-mean")
    return list(
        training_rows(samples, masks, {"advantages": advantages}, np.arange(count), aggregation, range(count)).values()
    )


@pytest.fixture(scope="module")
def quantized(start) -> Callable[..., Any]:
    """Builds an engine whose learner has weights in 4 bits."""

    def build(stage: int = 0, **options: Any) -> Any:
        learner = {"lr": 1e-2, "zero_stage": stage, "tokens_per_microbatch": 200, **options.pop("learner", {})}
        model = {"lora": LORA, "quantize": "nf4", "dtype": options.pop("dtype", "float32")}
        return start(learner=learner, model=model, **options)

    return build


@pytest.mark.parametrize("shape", [(48, 128), (64, 100), (300, 256)])
def test_a_weight_out_of_4_bits_is_the_nearest_level_times_its_blocks_largest_value(shape):
    """The scales are of 8 bits: within half a hundredth of the largest one, beside which the paper's levels are exact.

    Rows of 100 weights are no whole number of blocks, and 300 x 256 weights have more than 256 scales.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = quantization.unpack(quantization.pack(weight), shape, torch.float32)
    blocks, ours = weight.reshape(-1, 64), found.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS)
    nearest = levels[(blocks / scale).unsqueeze(-1).sub(levels).abs().argmin(-1)]
    assert float((ours - nearest * scale).abs().max()) < 0.02
    used = ours / ours.abs().amax(1, keepdim=True)  # whatever the scale is
    assert float((used - nearest).abs().max()) < 1e-6
    assert float((found - weight).abs().mean() / weight.abs().mean()) < 0.1


def test_a_weight_has_half_a_byte_and_a_scale_and_the_same_bytes_in_every_type_and_with_any_number_of_threads():
    weight = torch.randn(2048, 1088, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed, threads = quantization.pack(weight), torch.get_num_threads()
    count = 2048 * 1088  # more scales than torch adds up in one thread
    assert packed.dtype == torch.uint8 and len(packed) == count // 2 + count // 64 + 4 * (count // 64 // 256) + 4
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(packed, quantization.pack(weight.float()))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_as_a_linear_layer_with_the_unpacked_weight_does(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(100, 64).to(dtype).requires_grad_(False)
    layer = QuantizedLinear(linear, dtype)
    inputs = [torch.randn(3, 7, 100, dtype=dtype).requires_grad_(), torch.empty(0)]
    inputs[1] = inputs[0].detach().clone().requires_grad_()
    linear.weight.data = layer.unpacked()
    outputs = [layer(inputs[0]), linear(inputs[1])]
    weights = torch.randn_like(outputs[0])
    gradients = [
        torch.autograd.grad((output * weights).sum(), one)[0] for output, one in zip(outputs, inputs, strict=True)
    ]
    assert torch.equal(*outputs) and torch.equal(*gradients)
    assert layer.weight.grad is None and layer.weight.dtype == torch.uint8


def test_the_language_models_layers_are_quantised_and_nothing_else(vision):
    lora = LoraConfig(rank=2, targets=("language",))
    policy = load_policy(vision.folder, "cpu", "float32", freeze=(), temperature=1.0, lora=lora, quantize=True, seed=3)
    plain = load_policy(vision.folder, "cpu", "float32", freeze=(), temperature=1.0, lora=lora, seed=3)
    packed = {n.removesuffix(".base_layer") for n, m in policy.model.named_modules() if isinstance(m, QuantizedLinear)}
    expected = [name for name, *_ in ((a.name,) for a in plain.adapted)]
    assert sorted(packed) == sorted(expected) and len(packed) == 14
    ours, theirs = (dict(each.named_weights(torch.float32)) for each in (policy, plain))
    assert list(ours) == list(theirs)
    assert {name.removesuffix(".weight") for name in ours if not torch.equal(ours[name], theirs[name])} == packed
    count, largest = quantized_sizes(vision.folder)
    assert count == sum(ours[f"{name}.weight"].numel() for name in packed)
    assert largest == max(ours[f"{name}.weight"].numel() for name in packed)
    matrices = [adapters.file_names(each.adapted) for each in (policy, plain)]
    assert all(torch.equal(matrices[0][name], matrices[1][name]) for name in matrices[1])


def test_an_export_has_the_weights_that_a_run_in_bfloat16_computes_with(vision):
    options: dict[str, Any] = {"freeze": (), "temperature": 1.0, "quantize": True}
    lora = LoraConfig(rank=2, targets=("language",))
    policy = load_policy(vision.folder, "cpu", "bfloat16", lora=lora, **options)
    rounded = load_policy(vision.folder, "cpu", "float32", rounded_as=torch.bfloat16, **options)
    assert not list(quantization.packed_layers(rounded))
    whole = dict(rounded.named_weights(torch.float32))
    for adapter in policy.adapted:
        assert torch.equal(whole[f"{adapter.name}.weight"], quantization.whole(adapter.layer.base_layer).float())


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_only_adapters_move_and_the_sampler_gets_what_the_learner_computes_with(stage, quantized, rows, vision, plain):
    """Plain transformers with the weights that are streamed has the learner's log-probs, and its reference's."""
    samples = [row.sample for row in rows]
    with quantized(stage, algorithm={"kl": {"coef": 0.1}}).learning() as learner:
        before, first = merged(learner), learner.network("reference").score(samples)
        for _ in range(2):
            learner.network("policy").update(held_to_reference(learner, rows))
        after, current, reference = (
            merged(learner),
            learner.network("policy").score(samples),
            learner.network("reference").score(samples),
        )
        names = {f"{adapter.name}.weight" for adapter in learner.policy.adapted}
        packed = [layer.weight for layer in quantization.packed_layers(learner.policy)]
        assert len(packed) == 14 and not any(weight.is_floating_point() for weight in packed)
    assert {name for name in before if not torch.equal(before[name], after[name])} == names
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(reference))
    for values, weights in ((reference, before), (current, after)):
        model = plain(vision.folder.path)
        model.model.load_state_dict(weights)
        single = [model.logprobs(sample, vision.media).detach() for sample in samples]
        np.testing.assert_allclose(np.concatenate(values), torch.cat(single), atol=2e-5)
    assert np.abs(np.concatenate(current) - np.concatenate(reference)).max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_goes_on_bit_for_bit_from_adapters_alone(stage, dtype, quantized, rows, tmp_path):
    def step(learner: Any) -> Any:
        result = learner.network("policy").update(rows)
        return result.metrics, np.concatenate(result.logprobs).tobytes()

    with quantized(stage, dtype=dtype).learning() as learner:
        step(learner)
        learner.save(tmp_path)
        told, end = [step(learner) for _ in range(2)], merged(learner)
    with quantized(stage, dtype=dtype, checkpoint=tmp_path).learning() as learner:
        assert [step(learner) for _ in range(2)] == told
        again = merged(learner)
    assert all(torch.equal(end[name], again[name]) for name in end)
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_sampler_and_learner_agree_and_an_export_is_what_the_run_sampled_with(quantized, rows, vision, tmp_path, plain):
    engine = quantized(with_sampler=True, sampler={"name": "hf", "max_new_tokens": 8, "group_size": 2})
    with engine.learning() as learner:
        learner.network("policy").update(rows)
        learner.save(tmp_path)
        weights = merged(learner)
    requests = [SamplingRequest(prompt, 2, TEMPERATURE, 8, seed=n) for n, prompt in enumerate(vision.prompts)]
    with engine.sampling() as sampler:
        rollouts = [rollout for _, group in sampler.generate(requests) for rollout in group.rollouts]
    samples = [Sample(rollout.prompt, rollout.segments) for rollout in rollouts]
    with engine.learning() as learner:
        gap = [
            np.abs(values - sample.sampler_logprobs).max()
            for values, sample in zip(learner.network("policy").score(samples), samples, strict=True)
        ]
    assert max(gap) < 1e-4
    whole = tmp_path / "whole"
    for target in (whole, tmp_path / "alone"):
        target.mkdir()
    found = export_model(tmp_path / "model", None, whole, tmp_path / "media", dtype=None)
    assert found.dtype == "float32" and not found.is_rounded and found.gap.abs_max < 1e-4
    exported = plain(whole).model.state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert not (whole / quantization.FILE).exists()
    export_adapter(tmp_path / "model", tmp_path / "alone", tmp_path / "media")
    assert quantization.read(tmp_path / "alone")


def test_transformers_quantises_the_base_alike_from_the_file_beside_the_adapter(quantized, rows, vision, tmp_path):
    import peft
    import transformers

    samples = [row.sample for row in rows]
    with quantized().learning() as learner:
        learner.network("policy").update(rows)
        learner.save(tmp_path)
        expected = {adapter.name: quantization.whole(adapter.layer.base_layer) for adapter in learner.policy.adapted}
    settings = json.loads((tmp_path / "model" / quantization.FILE).read_text())
    base = transformers.AutoModelForImageTextToText.from_pretrained(
        vision.folder.path, dtype=torch.float32, quantization_config=transformers.BitsAndBytesConfig(**settings)
    )
    model = peft.PeftModel.from_pretrained(base, tmp_path / "model")
    from bitsandbytes.functional import dequantize_4bit

    found = {
        name.removeprefix("base_model.model.").removesuffix(".base_layer"): module.weight
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit" and module.__module__.startswith("bitsandbytes")
    }
    language = {name for name in expected if "language_model" in name}
    assert found.keys() == language and samples
    for name, weight in found.items():
        # The mean of its scales is added up in float32, ours in float64.
        torch.testing.assert_close(dequantize_4bit(weight.data, weight.quant_state), expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("content", ["{", '{"load_in_8bit": true}'])
def test_an_adapter_of_a_base_that_is_quantised_otherwise_is_refused(content, tmp_path):
    (tmp_path / quantization.FILE).write_text(content)
    with pytest.raises(ConfigError, match="quantised in an unknown way") as caught:
        quantization.read(tmp_path)
    assert quantization.FILE in caught.value.where and "double quantisation" in caught.value.possible


def test_without_bitsandbytes_the_command_to_install_it_is_told(monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="bitsandbytes is not installed") as caught:
        quantization.check_installed()
    assert "pip install" in caught.value.remedy and caught.value.exit_code == 5


@pytest.mark.parametrize("broken", ["raises", "wrong"])
def test_a_bitsandbytes_without_kernels_for_the_device_is_refused(broken, vision, monkeypatch):
    def unpack(*_: Any) -> torch.Tensor:
        if broken == "raises":
            raise RuntimeError("Some tensors have been allocated without CUDA kernels")
        return torch.zeros(64, 1024)

    monkeypatch.setattr(quantization, "unpack", unpack)
    with pytest.raises(ResourceError, match="bitsandbytes cannot compute on this device") as caught:
        load_policy(vision.folder, "cpu", "float32", freeze=(), temperature=1.0, lora=LoraConfig(), quantize=True)
    assert "python -m bitsandbytes" in caught.value.possible


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes"])
def test_a_folder_tells_how_its_weights_are_quantised(method, vision):
    assert vision.folder.quantized_by is None
    config = type(vision.folder.config)(quantization_config={"quant_method": method, "bits": 4})
    assert replace(vision.folder, config=config).quantized_by == method


def test_odd_rows_stay_whole(vision):
    layers = {"model.language_model.layers.0.mlp.up_proj": torch.nn.Linear(7, 8)}
    assert quantization.quantizable(layers, vision.folder.family) == []
