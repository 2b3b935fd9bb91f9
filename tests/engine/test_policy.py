"""Packed rows against plain transformers, one sample at a time: log-probs and gradients, for every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.layout import PackedLayout
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.vision import ImageInputs, idle_sample
from mmrl.errors import ConfigError
from mmrl.ops.packing import Span
from mmrl.types import Message, Prompt
from tests.conftest import tower_passes
from tests.proofs import families

LENGTHS = (5, 17, 9, 1, 12, 6, 21)
TEMPERATURE = 0.8
DECAY = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.in_proj_a.weight")
"""Parameters whose gradient in float32 depends on the length of the chunks: transformers' own with chunks of 64 is
1.5e-5 away from a recurrence in float64."""


@pytest.fixture
def build(bench: Callable[..., Any]) -> Callable[..., tuple[Any, Policy, Collator]]:
    """A family's bench, policy and collator."""

    def load(family: str, as_on_hub: bool = False) -> tuple[Any, Policy, Collator]:
        setting = bench(family, as_on_hub)
        policy = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=TEMPERATURE)
        images = ImageInputs(setting.folder, setting.media)
        return setting, policy, Collator(setting.folder, policy.model.base_model, images, "cpu", torch.float32)

    return load


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to that gradient's norm."""
    assert one.keys() == other.keys()
    # A small gradient is a sum whose terms cancel, and keeps their rounding, which differs between processors: a key's
    # bias moves all scores of a query alike, and the queries and keys of a tower that attends evenly hardly matter.
    floor = 1e-3 * max(float(value.norm()) for value in one.values())
    errors = {name: float((one[name] - other[name]).norm() / one[name].norm().clamp(min=floor)) for name in one}
    return max(error / (10 if name.endswith(DECAY) else 1) for name, error in errors.items())


@pytest.mark.proves("packing")
@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", families("packing"))
def test_a_packed_row_equals_plain_transformers_one_by_one(family, as_on_hub, build, plain):
    setting, policy, collate = build(family, as_on_hub)
    samples = setting.samples(LENGTHS)
    coefficients_T = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))

    packed_T, entropy_T = policy(collate(samples))
    (packed_T * coefficients_T).sum().backward()

    reference = plain(setting.folder.path)
    single = [reference.logprobs(sample, setting.media) for sample in samples]
    (torch.cat(single) * coefficients_T).sum().backward()

    np.testing.assert_allclose(packed_T.detach(), torch.cat(single).detach(), atol=1e-5, rtol=0)
    assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5
    first = samples[0]
    images = [setting.media.load(ref) for ref in first.prompt.images]
    table = reference.distribution(first.prompt.text, images, first.token_ids.tolist())[:-1].exp()
    expected = torch.distributions.Categorical(table).entropy()
    np.testing.assert_allclose(entropy_T[: LENGTHS[0]], expected.detach(), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_with_a_window_look_back_as_far_in_a_packed_row_as_alone(family, bench, plain, models, tmp_path):
    """Rows, prompts and completions are longer than the window, which goes back into a shared prompt."""
    setting, lengths = bench(family), (30, 17, 9, 1, 12)
    path = shutil.copytree(models(family), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    layers = ["sliding_attention", "full_attention"]
    config |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "layer_types": layers}
    (path / "config.json").write_text(json.dumps(config))
    folder = ModelFolder.open(str(path))
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=TEMPERATURE)
    collate = Collator(folder, policy.model.base_model, ImageInputs(folder, setting.media), "cpu", torch.float32)
    samples = setting.samples(lengths)
    inputs = collate(samples)
    packed_T, _ = policy(inputs)
    coefficients_T = torch.linspace(-1, 2, len(packed_T))
    (packed_T * coefficients_T).sum().backward()
    reference, unlimited = plain(path), plain(setting.folder.path)
    expected_T = torch.cat([reference.logprobs(sample, setting.media) for sample in samples])
    (expected_T * coefficients_T).sum().backward()
    np.testing.assert_allclose(packed_T.detach(), expected_T.detach(), atol=1e-5)
    assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5
    everything_T = torch.cat([unlimited.logprobs(sample, setting.media) for sample in samples])
    assert (everything_T - packed_T).detach().abs().max() > 1e-3
    shape, layout = model_shape(folder.config), inputs.model_inputs["layout"]
    assert (shape.window, shape.local_layers) == (6, 1)
    assert layout.pairs_within(6) < layout.pairs


@pytest.mark.full
def test_the_tokens_of_an_image_see_each_other_in_layers_with_a_window_alone(bench, plain, models, tmp_path):
    """As in the larger models of Gemma 4, whose images are longer than the window here."""
    setting, path = bench("gemma4", True), shutil.copytree(models("gemma4", True), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"use_bidirectional_attention": "vision", "sliding_window": 40}
    (path / "config.json").write_text(json.dumps(config))
    folder, samples = ModelFolder.open(str(path)), setting.samples(LENGTHS)
    policy, images = (
        load_policy(folder, "cpu", "float32", freeze=(), temperature=TEMPERATURE),
        ImageInputs(folder, setting.media),
    )
    reference, causal = plain(path), plain(setting.folder.path)
    expected_T = torch.cat([reference.logprobs(sample, setting.media) for sample in samples])
    coefficients_T = torch.linspace(-1, 2, len(expected_T))
    (expected_T * coefficients_T).sum().backward()
    for share in (True, False):
        collate = Collator(folder, policy.model.base_model, images, "cpu", torch.float32, share=share)
        policy.zero_grad()
        found_T, _ = policy(collate(samples))
        (found_T * coefficients_T).sum().backward()
        np.testing.assert_allclose(found_T.detach(), expected_T.detach(), atol=1e-5)
        assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5
    blind_T = torch.cat([causal.logprobs(sample, setting.media) for sample in samples])
    assert (blind_T - found_T).detach().abs().max() > 1e-3


@pytest.mark.parametrize("family", families("vision_once"))
def test_an_idle_sample_runs_the_vision_tower_for_nothing(family, build, plain):
    setting, policy, collate = build(family)
    sample = setting.samples([6])[0]
    logprobs_T, _ = policy(collate([sample, idle_sample(setting.folder)]))
    idle_T, logprobs_T = logprobs_T[6:], logprobs_T[:6]
    (logprobs_T.sum() + 0.0 * idle_T.sum()).backward()
    expected = plain(setting.folder.path).logprobs(sample, setting.media)
    np.testing.assert_allclose(logprobs_T.detach(), expected.detach(), atol=1e-5)
    part_of, parts = setting.folder.family.part_of, ("vision", "projector")
    tower = {name: each for name, each in gradients(policy.model).items() if part_of(name) in parts}
    assert tower.keys() == {name for name, _ in policy.model.named_parameters() if part_of(name) in parts}
    assert not any(gradient.any() for gradient in tower.values())  # present, as ranks wait for it, and zero


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_wrong_positions_or_a_lost_layout_are_noticed(family, build):
    setting, policy, collate = build(family)
    samples = setting.samples(LENGTHS)
    inputs = collate(samples)
    with torch.no_grad():
        right_T, _ = policy(inputs)
        rows = inputs.model_inputs["position_ids"]
        one_long = PackedLayout([Span(0, rows.shape[-1])], "cpu", torch.float32)
        for wrong in ({"position_ids": 2 * rows}, {"layout": one_long}):
            wrong_T, _ = policy(replace(inputs, model_inputs=inputs.model_inputs | wrong))
            assert (wrong_T - right_T).abs().max() > 1e-3


def test_the_order_of_images_and_prompts_in_a_row_does_not_matter(build):
    setting, policy, collate = build("qwen2_5_vl")
    samples = setting.samples(LENGTHS)
    with torch.no_grad():
        forward = policy(collate(samples))[0].split(LENGTHS)
        backward = policy(collate(samples[::-1]))[0].split(LENGTHS[::-1])[::-1]
    np.testing.assert_allclose(torch.cat(forward), torch.cat(backward), atol=1e-5)


@pytest.mark.proves("vision_once")
@pytest.mark.parametrize("family", families("vision_once"))
def test_prompts_that_show_the_same_image_share_its_features(family, build, plain, picture):
    setting, policy, collate = build(family)
    asked = [
        ("<image>What is it?", (picture(56, 56),)),
        ("<image><image>Which one?", (picture(150, 110), picture(56, 56))),
        ("<image>And this?", (picture(56, 56),)),
    ]
    prompts = [Prompt(text, (Message("user", text),), images) for text, images in asked]
    encoded = [setting.encoder.encode(prompt) for prompt in prompts]
    samples = [replace(sample, prompt=encoded[i % 3]) for i, sample in enumerate(setting.samples(LENGTHS))]
    passes, pixels = tower_passes(policy.model, setting.folder.family), ImageInputs(setting.folder, setting.media)
    logprobs_T, _ = policy(collate(samples))
    different = {ref.hash: len(pixels(ref)[0]) for prompt in encoded for ref in prompt.images}
    assert len(different) == 2 and passes == [sum(different.values())]
    logprobs_T.square().sum().backward()
    reference = plain(setting.folder.path)
    expected_T = torch.cat([reference.logprobs(sample, setting.media) for sample in samples])
    expected_T.square().sum().backward()
    np.testing.assert_allclose(logprobs_T.detach(), expected_T.detach(), atol=1e-5)
    assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5


@pytest.mark.proves("sharing")
@pytest.mark.parametrize("family", families("sharing"))
def test_sharing_changes_neither_logprobs_nor_gradients(family, build):
    setting, policy, collate = build(family)
    alone = Collator(
        setting.folder,
        policy.model.base_model,
        ImageInputs(setting.folder, setting.media),
        "cpu",
        torch.float32,
        share=False,
    )
    samples, found = setting.samples(LENGTHS), []
    for pack in (collate, alone):
        inputs = pack(samples)
        policy.zero_grad()
        logprobs_T, _ = policy(inputs)
        (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
        gradient = {name: value.clone() for name, value in gradients(policy.model).items()}
        found.append((inputs.model_inputs["input_ids"].shape[1], logprobs_T.detach(), gradient))
    (shared, *values), (separate, *expected) = found
    prompts = [len(prompt.token_ids) for prompt in setting.prompts]
    uses = [len(range(i, len(LENGTHS), len(prompts))) for i in range(len(prompts))]
    assert separate - shared == sum((n - 1) * tokens for n, tokens in zip(uses, prompts, strict=True))
    np.testing.assert_allclose(values[0], expected[0], atol=1e-5)
    assert relative_error(expected[1], values[1]) < 1e-5


def test_gradients_are_the_same_to_the_bit_with_several_threads(build):
    """Many completions have their prompt's last token in common, and a race would add their gradients in any order."""
    setting, policy, collate = build("qwen2_5_vl")
    inputs, found = collate(setting.samples([12] * 128)), set()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(4):
            policy.zero_grad()
            logprobs_T, _ = policy(inputs)
            (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
            found.add(hash(b"".join(value.numpy().tobytes() for value in gradients(policy.model).values())))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("family", families("vision_once"))
def test_pixels_reach_the_policy(family, build, picture):
    """A transformers that drops what the tower made of them says nothing, and every picture is the same to it."""
    setting, policy, collate = build(family)
    sample = setting.samples([0, 8])[1]
    other = setting.media.add(picture(56, 56, seed=1))
    swapped = replace(sample, prompt=replace(sample.prompt, images=(other,)))
    with torch.no_grad():
        assert (policy(collate([sample]))[0] - policy(collate([swapped]))[0]).abs().max() > 1e-3


def test_banned_ids_are_outside_the_softmax(build):
    setting, policy, collate = build("qwen2_5_vl")
    sample = setting.samples([4])[0]
    with torch.no_grad():
        before_T, _ = policy(collate([sample]))
        policy.model.lm_head.weight[list(setting.folder.vocabulary.banned)] *= 100
        after_T, entropy_T = policy(collate([sample]))
    np.testing.assert_allclose(before_T, after_T, atol=1e-5)
    assert torch.isfinite(entropy_T).all()


def test_weights_are_named_as_in_the_state_dict_with_the_tied_head(build):
    _, policy, _ = build("qwen2_5_vl")
    names = dict(policy.named_weights(torch.bfloat16))
    assert names.keys() == policy.model.state_dict().keys()
    assert torch.equal(names["lm_head.weight"], names["model.language_model.embed_tokens.weight"])
    assert {weight.dtype for weight in names.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "lost"), [("llama", "lm_head.weight"), ("qwen3_vl", "model.visual.pos_embed.weight")]
)
def test_weights_that_the_files_lack_are_named_and_not_drawn_at_random(family, lost, models, tmp_path):
    path = shutil.copytree(models(family, True), tmp_path / "model")
    for file in path.glob("*.safetensors"):
        save_file({name: w for name, w in load_file(file).items() if name != lost}, file, {"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"lack 1 of its weights: {lost}"):
        load_policy(ModelFolder.open(str(path)), "cpu", "float32", freeze=(), temperature=1.0)
