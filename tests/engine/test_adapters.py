"""LoRA in the real learner: what is adapted, its gradient, its merged weights, its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.sections import LoraConfig
from mmrl.engine import device
from mmrl.engine.aids.exporting import write_merged
from mmrl.engine.network import adapters, merged_linear
from mmrl.engine.network import policy as policies
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.sizes import part_sizes
from mmrl.engine.network.weights import Failures, save_adapter
from mmrl.engine_api import SamplingRequest
from mmrl.errors import ConfigError
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import TrainingRow
from tests.engine.adapted import held_to_reference, merged
from tests.proofs import families

LENGTHS = (4, 19, 7, 3, 11, 24, 6)
LORA = {"rank": 4, "alpha": 6, "targets": ["language", "vision", "projector"]}
STAGES = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.fixture(scope="module")
def rows(vision) -> list[TrainingRow]:
    return rows_of(vision)


def rows_of(bench: Any, *, episodes: bool = False) -> list[TrainingRow]:
    """Rows of text, and of one image and of two for a model that reads them, in several micro-batches.

    Args:
        episodes: True to add episodes with images in observations, if the model reads images.
    """
    samples = [*bench.samples(LENGTHS), *(bench.episodes() if episodes and bench.folder.family.vision else [])]
    masks = [sample.mask for sample in samples]
    advantages = [np.full(n, (-1.0) ** n * n / 9) for n in map(len, masks)]
    indices = range(len(samples))
    aggregation = Aggregation("token-mean")
    return list(
        training_rows(
            samples, masks, {"advantages": advantages}, np.arange(len(samples)), aggregation, indices
        ).values()
    )


@pytest.fixture(scope="module")
def adapted(start) -> Callable[..., Any]:
    """Builds a learner with adapters."""

    def build(stage: int = 0, **options: Any) -> Any:
        learner = {"lr": 1e-2, "zero_stage": stage, "tokens_per_microbatch": 200, **options.pop("learner", {})}
        model = {"lora": {**LORA, **options.pop("lora", {})}, "dtype": options.pop("dtype", "float32")}
        return start(learner=learner, model=model, **options)

    return build


@pytest.mark.parametrize("bucket_bytes", [0, 20_000, 2**28])
@pytest.mark.parametrize("tied", [False, True])
def test_partitioned_weights_are_gathered_once_each_with_their_adapters(tied, bucket_bytes, adapted, monkeypatch):
    import deepspeed

    policy = adapted(stage=3)._learner.policy
    real, buckets = policies.gathered, list[tuple[Any, ...]]()
    monkeypatch.setattr(policies, "GATHERED_BYTES", bucket_bytes)
    monkeypatch.setattr(policies, "gathered", lambda *_: nullcontext())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(policy.parameters()), modifier_rank=0):
        for adapter in policy.adapted:
            adapter.factors["lora_B.weight"].normal_(0, 0.1)
        expected = {name: weight.clone() for name, weight in policy.named_weights(torch.float32, tied=tied)}
    monkeypatch.setattr(policies, "gathered", lambda *bucket: (buckets.append(bucket), real(*bucket))[1])
    found = {}
    for name, weight in policy.named_weights(torch.float32, tied=tied):
        found[name] = weight  # kept, not copied: it outlives its bucket
        assert sum(parameter.numel() > 0 for parameter in policy.parameters()) <= len(buckets[-1])
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)
    assert sorted(map(id, chain(*buckets))) == sorted(map(id, policy.parameters()))
    factors = {id(factor) for adapter in policy.adapted for factor in adapter.factors.values()}
    weights = [[each.ds_numel * 4 for each in bucket if id(each) not in factors] for bucket in buckets]
    assert all(len(sizes) == 1 or sum(sizes) <= bucket_bytes for sizes in weights)
    assert {0: len(weights) == sum(map(len, weights)), 20_000: len(weights) > 9, 2**28: len(weights) == 1}[bucket_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_some_rows_at_a_time_and_rounded_once(dtype, monkeypatch):
    monkeypatch.setitem(device.MERGED_AT_ONCE, "cpu", 3 * 16 + 5)  # three rows of 16, and of ten the last alone
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((10, 16), (4, 16), (10, 4)))
    expected = (weight.double() + 1.5 * b.double() @ a.double()).to(dtype)
    found = merged_linear.merged(weight, a, b, 1.5, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-6 if dtype == torch.float32 else 0, rtol=0)


def plain_with(plain: Any, folder: str, weights: dict[str, torch.Tensor]) -> Any:
    """The model in plain transformers, with these weights."""
    reference = plain(folder)
    kept = {name: value for name, value in reference.model.state_dict().items() if name not in weights}
    assert not kept.keys() & dict(reference.model.named_parameters(remove_duplicate=False)).keys()
    reference.model.load_state_dict(weights | kept)
    return reference


@pytest.mark.parametrize(
    ("family", "targets", "count"),
    [
        ("qwen2_5_vl", ["language"], 14),
        ("qwen2_5_vl", ["vision", "projector"], 12),
        ("qwen2_5_vl", ["q_proj", "layers.1.mlp.*"], 5),
        ("qwen2_5_vl", ["visual.blocks.0.attn.qkv", "qkv"], 2),
        ("qwen3_vl", ["projector"], 4),
        ("internvl", ["vision", "projector"], 14),
        ("llama", ["language"], 14),
        ("gemma4", ["embedding_projection"], 1),  # and none in the tower for sound
        ("qwen3", ["model.layers.*.self_attn.?_proj"], 8),
    ],
)
def test_targets_are_parts_names_ends_and_patterns(family, targets, count, bench):
    folder = bench(family).folder
    lora = LoraConfig(targets=tuple(targets))
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0, lora=lora)
    names = [adapter.name for adapter in policy.adapted]
    assert len(names) == len(set(names)) == count
    for target in set(targets) & {"language", "vision", "projector"}:
        assert {folder.family.part_of(f"{name}.") for name in names} <= set(targets), target
    assert sum(p.requires_grad for p in policy.parameters()) == 2 * count
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    sizes = part_sizes(folder, lora=lora)
    assert sum(count for count, _ in sizes.values()) == trained
    assert sum(count for _, count in sizes.values()) == sum(
        p.numel() for p in policy.parameters() if not p.requires_grad
    )


@pytest.mark.parametrize("targets", [["vision"], ["lm_head"], ["language", "qproj"], ["embed_tokens"], ["*.norm"]])
def test_a_target_that_means_nothing_is_refused_with_what_there_is(targets, bench):
    with pytest.raises(ConfigError, match=r"q_proj") as caught:
        part_sizes(bench("qwen2").folder, lora=LoraConfig(targets=tuple(targets)))
    assert caught.value.where == "model.lora.targets" and repr(targets[-1]) in str(caught.value)


@pytest.mark.parametrize("family", families("lora"))
def test_adapters_begin_as_the_model_and_are_drawn_from_the_seed(family, bench):
    def load(seed: int, **options: Any) -> Any:
        return load_policy(bench(family).folder, "cpu", "float32", freeze=(), temperature=1.0, seed=seed, **options)

    lora = LoraConfig(targets=tuple(FAMILIES[family].parts))
    torch.manual_seed(1)
    one = load(3, lora=lora)
    torch.manual_seed(2)
    same, other, base = load(3, lora=lora), load(4, lora=lora), load(3)
    matrices = [adapters.file_names(policy.adapted) for policy in (one, same, other)]
    assert all(torch.equal(matrices[0][name], matrices[1][name]) for name in matrices[0])
    assert any(not torch.equal(matrices[0][name], matrices[2][name]) for name in matrices[0])
    for tied in (True, False):
        weights, expected = (dict(policy.named_weights(torch.float32, tied=tied)) for policy in (one, base))
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.proves("lora")
@pytest.mark.parametrize("family", families("lora"))
def test_the_gradient_is_the_chain_rules_of_the_merged_weights(family, adapted, bench, plain):
    """For W + s B A: dL/dA = s B^T dL/dW, dL/dB = s dL/dW A^T, with dL/dW by plain autograd on the merged model."""
    setting, exposed = bench(family), {"optimizer": {"params": {"betas": [0.0, 0.999]}}}
    engine = adapted(
        bench=setting,
        lora={"targets": list(setting.folder.family.parts)},
        learner={"lr": 1e-30, "max_grad_norm": 1e9, "deepspeed": exposed},
        algorithm={"kl": {"coef": 0.1}},
    )
    rows = rows_of(setting, episodes=True)
    generator = torch.Generator().manual_seed(0)
    with engine.learning() as learner:
        for adapter in learner.policy.adapted:
            adapter.factors["lora_B.weight"].data.normal_(0, 0.1, generator=generator)
        # Adapters that were switched off for the reference must have their gradient all the same.
        samples = [row.sample for row in rows]
        known = zip(rows, learner.network("reference").score(samples), strict=True)
        learner.network("policy").update(
            [
                replace(row, columns={**row.columns, "reference_logprobs": values}, constants={"kl_coef": 0.0})
                for row, values in known
            ]
        )
        reference = plain_with(plain, setting.folder.path, merged(learner))
        weight = 1 / sum(int(row.mask.sum()) for row in rows)
        for row in rows:
            (-weight * float(row.advantages[0]) * reference.logprobs(row.sample, setting.media).sum()).backward()
        by_plain = dict(reference.model.named_parameters())
        state = learner.trained.engine.optimizer.state
        found, expected = [], []
        for adapter in learner.policy.adapted:
            a, b = adapter.factors.values()
            gradient = by_plain[f"{adapter.name}.weight"].grad
            found += [state[a]["exp_avg"], state[b]["exp_avg"]]
            expected += [6 / 4 * b.detach().T @ gradient, 6 / 4 * gradient @ a.detach().T]
    differences = [one - other for one, other in zip(found, expected, strict=True)]
    assert min(float(value.norm()) for value in expected) > 0
    norms = [float(torch.stack([value.norm() for value in values]).norm()) for values in (differences, expected)]
    assert norms[0] < 1e-5 * norms[1]


@pytest.mark.proves("lora")
@pytest.mark.parametrize("family", families("lora", "hf"))
def test_a_sampler_gets_the_merged_weights_after_an_update(family, adapted, bench, plain):
    setting = bench(family)
    rank = adapted(
        with_sampler=True,
        bench=setting,
        lora={"targets": list(setting.folder.family.parts)},
        sampler={"name": "hf"},
        stage=3,
    )
    requests = [SamplingRequest(prompt, 2, 0.8, 16, seed) for seed, prompt in enumerate(setting.prompts)]
    with rank.learning() as learner:
        before = merged(learner)
        learner.network("policy").update(rows_of(setting))
        after = merged(learner)
        names = {f"{adapter.name}.weight" for adapter in learner.policy.adapted}
    assert names == {name for name in before if not torch.equal(before[name], after[name])} != set()
    with rank.sampling() as sampler:
        rollouts = [rollout for _, group in sampler.generate(requests) for rollout in group.rollouts]
    with rank.learning() as learner:
        own = np.concatenate(learner.network("policy").score(rollouts))
    reference = plain_with(plain, setting.folder.path, after)
    single = torch.cat([reference.logprobs(rollout, setting.media).detach() for rollout in rollouts])
    np.testing.assert_allclose(np.concatenate([rollout.sampler_logprobs for rollout in rollouts]), own, atol=1e-4)
    np.testing.assert_allclose(own, single, atol=2e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_only_adapters_move_and_merged_weights_are_the_policy(stage, adapted, rows, vision, plain):
    samples = [row.sample for row in rows]
    with adapted(stage, algorithm={"kl": {"coef": 0.1}}).learning() as learner:
        before = merged(learner)
        first = learner.network("reference").score(samples)
        for _ in range(2):
            learner.network("policy").update(held_to_reference(learner, rows))
        after, current, reference = (
            merged(learner),
            learner.network("policy").score(samples),
            learner.network("reference").score(samples),
        )
        names = {f"{adapter.name}.weight" for adapter in learner.policy.adapted}
    assert {name for name in before if not torch.equal(before[name], after[name])} == names
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(reference))  # no update moves the reference
    for values, weights in ((reference, before), (current, after)):
        model = plain_with(plain, vision.folder.path, weights)
        single = [model.logprobs(sample, vision.media).detach() for sample in samples]
        np.testing.assert_allclose(np.concatenate(values), torch.cat(single), atol=2e-5)
    assert np.abs(np.concatenate(current) - np.concatenate(reference)).max() > 1e-2


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        (3, "float32"),
        pytest.param(3, "bfloat16", marks=pytest.mark.full),
        *(pytest.param(stage, "float32", marks=pytest.mark.slow) for stage in (1, 2)),
        *(pytest.param(stage, "bfloat16", marks=pytest.mark.slow) for stage in (0, 1, 2)),
    ],
)
def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_bit_for_bit(stage, dtype, adapted, rows, tmp_path):
    def step(learner: Any) -> Any:
        result = learner.network("policy").update(rows)
        return result.metrics, np.concatenate(result.logprobs).tobytes()

    with adapted(stage, dtype=dtype).learning() as learner:
        step(learner)
        learner.save(tmp_path)
        told, end = [step(learner) for _ in range(2)], merged(learner)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {adapters.CONFIG, adapters.WEIGHTS, "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert size < 2_000_000, "the checkpoint holds more than adapters and their optimizer's state"
    with adapted(stage, dtype=dtype, checkpoint=tmp_path).learning() as learner:
        assert [step(learner) for _ in range(2)] == told
        again = merged(learner)
    assert all(torch.equal(end[name], again[name]) for name in end)


def test_an_adapter_folder_loads_in_peft_and_transformers_and_merges(adapted, rows, vision, plain, tmp_path):
    import peft
    import transformers

    samples = [row.sample for row in rows]
    with adapted().learning() as learner:
        learner.network("policy").update(rows)
        learner.save(tmp_path)
        expected, weights = np.concatenate(learner.network("policy").score(samples)), merged(learner)
    folder = tmp_path / "model"
    auto = transformers.AutoModelForImageTextToText
    of_peft = peft.PeftModel.from_pretrained(auto.from_pretrained(vision.folder.path, dtype=torch.float32), folder)
    of_transformers = auto.from_pretrained(folder, dtype=torch.float32)
    by_hand = auto.from_pretrained(vision.folder.path, dtype=torch.float32)
    adapters.merge(by_hand, folder)
    reference = plain(vision.folder.path)
    for model in (of_peft, of_transformers, by_hand):
        reference.model = model.eval()
        found = torch.cat([reference.logprobs(sample, vision.media).detach() for sample in samples])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    for name, weight in by_hand.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_another_adapter_is_refused(adapted, start, tmp_path, bench):
    import transformers

    with adapted().learning() as learner:
        learner.save(tmp_path)
    with pytest.raises(ConfigError, match=r"another one: 52 matrices"):
        adapted(lora={"rank": 8}, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"another one"):
        adapted(lora={"targets": ["language"]}, checkpoint=tmp_path)
    folder = tmp_path / "model"
    other = transformers.AutoModelForCausalLM.from_pretrained(bench("llama").folder.path)
    with pytest.raises(ConfigError, match=r"that of another model"):
        adapters.merge(other, folder)
    with pytest.raises(ConfigError, match=r"the checkpoint holds an adapter"):
        start(checkpoint=tmp_path)
    with pytest.raises(ConfigError, match=r"holds an adapter, and no whole model"):
        ModelFolder.open(str(folder))
    with start().learning() as learner:
        learner.save(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"the checkpoint holds a whole model"):
        adapted(checkpoint=tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "no plain LoRA: use_dora is True"),
        ({"init_lora_weights": "pissa"}, "no plain LoRA: init_lora_weights is 'pissa'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "no LoRA of linear layers: .*embed_tokens"),
        ({"lora_alpha": 8.5, "target_modules": "model.layers.1.*proj"}, ""),
        ({"target_modules": ["v_proj"], "layers_to_transform": [1]}, ""),
    ],
)
def test_adapters_of_peft_are_merged_as_peft_does_or_refused(options, reason, bench, tmp_path):
    import peft
    import transformers

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(bench("qwen2").folder.path)

    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options)
    made = peft.get_peft_model(model(), config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            parameter.data.normal_(0, 0.1)
    made.save_pretrained(tmp_path)
    found = model()
    if reason:
        with pytest.raises(ConfigError, match=reason):
            adapters.merge(found, tmp_path)
        return
    adapters.merge(found, tmp_path)
    expected = made.merge_and_unload().state_dict()
    assert all(torch.allclose(weight, expected[name], atol=1e-6) for name, weight in found.state_dict().items())
    (tmp_path / adapters.WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"weights cannot be read.*\n.*\n.*formats that hold Python objects"):
        adapters.merge(found, tmp_path)


def test_a_float32_adapter_of_a_model_that_is_stored_in_bfloat16_is_merged_in_float32(bench, tmp_path):
    """Rounding the merged weights would hide what the run has learned."""
    folder, lora = bench("qwen2", True).folder, LoraConfig(rank=2, targets=("language",))
    policy = load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0, lora=lora)
    for adapter in policy.adapted:
        adapter.factors["lora_B.weight"].data.normal_(0, 1e-3)
    failures = Failures()
    save_adapter(lora, policy, folder, tmp_path / "adapter", failures)
    assert failures.first is None
    (tmp_path / "whole").mkdir()
    write_merged(tmp_path / "adapter", tmp_path / "whole")
    found = load_policy(ModelFolder.open(str(tmp_path / "whole")), "cpu", "float32", freeze=(), temperature=1.0)
    expected = dict(policy.named_weights(torch.float32))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.named_weights(torch.float32))


def test_what_is_written_is_the_same_twice(adapted, tmp_path):
    """peft keeps names in sets; checkpoints are compared byte by byte."""
    files = []
    for name in ("one", "two"):
        with adapted().learning() as learner:
            learner.save(tmp_path / name)
        folder: Path = tmp_path / name / "model"
        files.append([path.read_bytes() for path in (folder / adapters.CONFIG, folder / adapters.WEIGHTS)])
    assert files[0] == files[1]
    modules = {
        name.partition("base_model.model.")[2].rpartition(".lora_")[0] for name in load_file(folder / adapters.WEIGHTS)
    }
    assert set(json.loads(files[0][0])["target_modules"]) == modules
