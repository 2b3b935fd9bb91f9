"""Bytes of a rank: states by hand, activations against what autograd keeps on real models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.engine.network.layout import PackedLayout
from mmrl.engine.network.linear_attention import pack_states
from mmrl.engine.network.shape import model_shape
from mmrl.ops.activations import (
    activations,
    exchanged_heads,
    layer_activations,
    patch_activations,
    whole_row,
)
from mmrl.ops.cost import ModelShape, TowerShape, Work, causal_pairs
from mmrl.ops.memory import (
    FrozenSize,
    States,
    Zero,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    layer_weights,
    states,
)
from mmrl.ops.packing import Span, Unit
from mmrl.ops.sequence import RowPart

M, MIB = 10**6, 2**20


def held(found: States) -> dict[str, int]:
    """The states that are not zero, in millions of bytes."""
    kinds = asdict(found).keys() - {"keeps_gradients", "locked"}
    return {name: value // M for name in kinds if (value := getattr(found, name))}


@pytest.mark.parametrize(
    ("width", "zero", "expected"),
    [
        (4, Zero(0, 1), {"weights": 12, "optimizer": 16, "gradients": 8, "step": 8}),
        (2, Zero(0, 1), {"weights": 6, "master": 8, "optimizer": 16, "gradients": 4, "step": 8}),
        (
            2,
            Zero(1, 2, reduce_bucket=M),
            {"weights": 6, "master": 4, "optimizer": 8, "gradients": 4, "buckets": 2, "reduced": 2, "step": 4},
        ),
        (  # the second buffer is filled while the first is reduced
            2,
            Zero(2, 2, reduce_bucket=M, buffers=2, float32_sums=True),
            {"weights": 6, "master": 4, "optimizer": 8, "gradients": 4, "buckets": 4, "reduced": 2},
        ),
        (  # what is added up, and what the last micro-batch adds
            4,
            Zero(2, 2, reduce_bucket=M, fused=False),
            {"weights": 12, "master": 4, "optimizer": 8, "gradients": 8, "buckets": 4, "reduced": 4, "step": 12},
        ),
        (
            2,
            Zero(3, 2, reduce_bucket=M, sub_group=M // 2),
            {
                "weights": 3, "master": 4, "optimizer": 8, "gradients": 4, "buckets": 2, "reduced": 2, "gathered": 6,
                "step": 2,
            },
        ),
        (2, Zero(3, 1, reduce_bucket=M), {"weights": 6, "master": 8, "optimizer": 16, "gradients": 8, "buckets": 2,
                                          "step": 8}),
        (2, Zero(3, 2, "optimizer", reduce_bucket=M), {"weights": 3, "buckets": 2, "reduced": 2, "gathered": 6,
                                                       "host": 20}),
        (2, Zero(3, 2, "parameters", reduce_bucket=M), {"buckets": 2, "reduced": 2, "gathered": 6, "host": 23}),
    ],
)  # fmt: skip
def test_states_of_two_million_trained_and_one_million_frozen_weights(width, zero, expected):
    assert held(states(2 * M, M, width=width, zero=zero)) == expected


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        # Float32 weights and gradients, the new weights, the largest one and each one's gradients; AdamW's averages.
        (Zero(1, 1, "optimizer"), 2 * 8 * MIB + 4 * MIB + MIB + (2 * MIB + 4 * MIB) + 16 * M),
        (Zero(2, 1, "optimizer", float32_sums=True), 2 * 8 * MIB + 4 * MIB + MIB + 16 * M),
        # The gradients of all of them and of each group; float32 weights and averages.
        (Zero(3, 1, "optimizer", sub_group=M), 8 * MIB + 2 * 4 * MIB + 24 * M),
        # The weights too, and once more as one tensor.
        (Zero(3, 1, "parameters"), 2 * 8 * MIB + 24 * M + (2 * MIB + 4 * MIB) + 4 * MIB),
        (Zero(3, 2, "parameters"), 2 * 4 * MIB + 12 * M + (1 * MIB + 2 * MIB) + 2 * MIB),
        (Zero(3, 2), 0),
    ],
)
def test_what_is_page_locked_is_as_large_as_the_next_power_of_two(zero, expected):
    """Two weights of 0.6 and 1.4 million numbers of 2 bytes."""
    found = states(2 * M, 0, width=2, zero=zero, largest=M // 2, weight_bytes=[1_200_000, 2_800_000])
    assert found.locked == pytest.approx(expected, abs=2)


def test_only_stage_3_keeps_gradients_between_steps_and_buckets_are_as_large_as_asked():
    found = [states(2 * M, 0, width=2, zero=Zero(stage, 2, float32_sums=stage > 1)) for stage in range(4)]
    assert [each.keeps_gradients for each in found] == [False, False, False, True]
    assert [each.buckets for each in found] == [0, 1000 * M, 1000 * M, 1000 * M]
    kinds = {"weights", "master", "optimizer"}
    assert [each.kept.keys() - kinds for each in found] == [set(), set(), set(), {"gradients", "buckets"}]


def test_what_is_gathered_is_what_is_used_again_soon_and_the_largest_weight():
    zero = Zero(3, 8, reuse=M)
    assert states(9 * M, 0, width=2, zero=zero, largest=3 * M).gathered == 8 * M
    assert states(9 * M, 0, width=2, zero=Zero(3, 1, reuse=M), largest=3 * M).gathered == 0


def test_weights_in_4_bits_take_half_a_byte_and_their_scales():
    zeros = [Zero(1, 1, reduce_bucket=0), Zero(3, 2, "parameters", reduce_bucket=0)]
    alone, away = (states(M, 101 * M, width=2, zero=zero, quantized=100 * M) for zero in zeros)
    in_4_bits = 50 * M + 100 * M // 64 + 100 * M // 64 // 256 * 4
    assert alone.weights == pytest.approx(2 * M * 2 + in_4_bits, abs=8)
    assert alone.optimizer == 8 * M and alone.master == 4 * M
    assert away.weights == 0 and away.gathered == pytest.approx(alone.weights)  # whole, while it is used
    none = states(M, 101 * M, width=2, zero=zeros[1])
    assert none.host - away.host == pytest.approx((200 * M - in_4_bits) / 2, abs=8)


@pytest.mark.parametrize(
    ("quantized", "adapted", "width", "expected"),
    [
        (0, 0, 2, 0),
        (7 * M, 0, 4, 28 * M),
        (7 * M, 9 * M, 4, 28 * M),  # adapters add products, and merge nothing
        (0, 9 * M, 2, 18 * M + 8 * 4 * M),  # two parts in float32
        (7 * M, 3 * M, 2, 14 * M + 6 * M + 8 * 3 * M),
    ],
)
def test_a_layer_makes_its_weight_out_of_4_bits_and_in_bfloat16_with_its_adapter(quantized, adapted, width, expected):
    found = layer_weights(quantized=quantized, adapted=adapted, width=width, merged_at_once=4 * M)
    assert found == expected


@pytest.mark.parametrize(
    ("width", "zero", "expected"),
    [
        # Of 8 and 6 million bytes of weights both stay, as do 4 and 2 million times 12 bytes of float32 copies and
        # averages; gradients of the policy and of the critic are never there together, nor what a step takes.
        (2, Zero(0, 1), {"weights": 14, "master": 24, "optimizer": 48, "gradients": 8, "step": 16}),
        (2, Zero(1, 2, reduce_bucket=M), {"weights": 14, "master": 12, "optimizer": 24, "gradients": 8, "buckets": 2,
                                          "reduced": 2, "step": 8}),
        # Gradients and both reduce buckets stay at stage 3; what is gathered is one network's: 8 of the policy's.
        (2, Zero(3, 2, reduce_bucket=M), {"weights": 7, "master": 12, "optimizer": 24, "gradients": 12, "buckets": 4,
                                          "reduced": 2, "gathered": 8, "step": 8}),
        (4, Zero(3, 2, "optimizer", reduce_bucket=M), {"weights": 14, "buckets": 8, "reduced": 4, "gathered": 16,
                                                       "host": 60}),
    ],
)  # fmt: skip
def test_a_critic_of_two_trained_and_one_frozen_million_beside_a_policy_of_four_million(width, zero, expected):
    policy, critic = states(4 * M, 0, width=width, zero=zero), states(2 * M, M, width=width, zero=zero)
    both = policy.beside(critic)
    assert held(both) == expected
    assert both.locked == policy.locked + critic.locked and both.keeps_gradients == (zero.stage == 3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_critics_adapters_on_the_policys_weights_add_no_weights_but_their_own(stage):
    zero = Zero(stage, 2, reduce_bucket=M)
    policy = states(M, 100 * M, width=2, zero=zero, reference="device", references=[FrozenSize(50 * M, M)])
    both, share = policy.beside(states(M, 0, width=2, zero=zero)), M if not stage else M // 2
    assert both.weights - policy.weights == 2 * M
    assert both.master - policy.master == 4 * share and both.optimizer - policy.optimizer == 8 * share
    assert both.reference == 100 * M and both.buckets == policy.buckets  # one bucket at a time


@pytest.mark.parametrize(
    ("stage", "place", "offloads", "expected"),
    [
        (3, "sharded", "none", (M, 0, 0)),
        (3, "sharded", "parameters", (0, 0, M)),
        (2, "host", "none", (0, 8 * M, 8 * M)),
        (2, "device", "none", (8 * M, 0, 0)),
    ],
)
def test_a_reference_is_sharded_or_comes_from_the_host_while_it_computes(stage, place, offloads, expected):
    with_it, without = (
        states(4 * M, 0, width=2, zero=Zero(stage, 8, offloads), reference=where) for where in (place, None)
    )
    assert (with_it.reference, with_it.reference_used, with_it.host - without.host) == expected


@pytest.mark.parametrize(
    ("stage", "place", "expected"),
    [(3, "sharded", (5 * M, 2 * M)), (2, "host", (0, 56 * M)), (0, "device", (80 * M, 0))],
)
def test_teachers_are_kept_together_and_compute_one_at_a_time(stage, place, expected):
    """One of 28 and one of 12 million parameters, whose largest weights have 2 and 1 million, beside a policy of 16."""
    zero, teachers = replace(Zero(stage, 16), reuse=0), [FrozenSize(28 * M, 2 * M), FrozenSize(12 * M, M)]
    found = states(16 * M, 0, width=2, zero=zero, largest=M, reference=place, references=teachers)
    assert (found.reference, found.reference_used) == expected


def test_settings_of_deepspeed_say_what_is_allocated():
    settings = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e6, "sub_group_size": 7},
        "optimizer": {"params": {"fused": True}},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    assert Zero.of(settings, 4) == Zero(2, 4, "none", 5 * M, 10**9, 7, 2, float32_sums=True, fused=True)
    place = {"device": "cpu"}
    plain = {"zero_optimization": {"stage": 3, "offload_optimizer": place}, "optimizer": {"params": {}}}
    assert Zero.of(plain, 1) == Zero(3, 1, "optimizer", 500 * M, fused=False)
    plain["zero_optimization"]["offload_param"] = place
    assert Zero.of(plain, 1).offloads == "parameters"


def kept_bytes(model: Any, inputs: dict[str, Any]) -> int:
    """Bytes of the different tensors that autograd keeps, parameters excepted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(**inputs, use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(kept.values())


def peak_bytes(model: Any, inputs: dict[str, Any]) -> int:
    """Bytes that torch has allocated at most in a forward and backward pass that adds to gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as found:
        model.base_model(**inputs, use_cache=False).last_hidden_state.sum().backward()
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "internvl", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text"]
)
def test_activations_are_about_what_autograd_keeps_and_with_checkpointing_what_torch_allocates(
    family: str, dtype: str, models: Callable[[str], Path]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(models(family))
    vision = hasattr(config, "vision_config")
    model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(
        models(family), dtype=getattr(torch, dtype)
    )
    model.train()
    shape, count = model_shape(config), 600
    ids = torch.randint(20, 200, (1, count))
    inputs: dict[str, Any] = {"input_ids": ids}
    grids: tuple[tuple[int, int, int], ...] = ()
    if family == "internvl":
        grids = ((36, 4, 4),)
        ids[:, :144] = config.image_token_id
        inputs["pixel_values"] = torch.randn(36, 3, 56, 56, dtype=getattr(torch, dtype))
    elif vision:
        grids = ((1, 24, 24),)
        ids[:, :144] = config.image_token_id
        inputs |= {
            "pixel_values": torch.randn(576, 1176, dtype=getattr(torch, dtype)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    pack_states(model)
    inputs["layout"] = PackedLayout([Span(0, count)], "cpu", model.dtype)
    work = shape.work(tokens=count, pairs=0, predicted=0, images=grids)
    pixels = inputs["pixel_values"].nbytes if vision else 0
    options = {"width": 2 if dtype == "bfloat16" else 4, "tower_trained": True, "logits_bytes": 0}
    part = RowPart.of(work, 1)
    assert activations(shape, part, checkpointing=False, **options) == pytest.approx(
        kept_bytes(model, inputs) + pixels, rel=0.2
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    most = peak_bytes(model, inputs) + pixels
    assert activations(shape, part, checkpointing=True, **options) == pytest.approx(most, rel=0.1)


def test_a_rank_that_shares_a_row_holds_its_embeddings_its_features_and_two_copies_of_heads() -> None:
    sizes = {"layers": 3, "width": 16, "heads": 8, "kv_heads": 2, "head_size": 4, "mlp_width": 32, "vocabulary": 50}
    tower = TowerShape(1, 8, 16, 2, patch_values=12, merge=2, out=16, mergers=2)
    shape, image = ModelShape(**sizes, tower=tower), Work(patches=40)
    row = Work(tokens=100, pairs=causal_pairs(100), predicted=60) + image
    alone = RowPart.of(row, 1, [image])
    assert exchanged_heads(shape, alone, width=2, checkpointing=False) == whole_row(shape, alone, width=2) == 0
    part = RowPart.of(row, 4, [image])
    whole = 100 * 16 + 10 * 2 * 16  # embeddings; 10 image tokens of two mergers
    twice = (
        25 * 4 * (2 * 8 + 2 * 4)
    )  # 25 tokens; 8 heads of queries and outputs, 2 of keys and values, each there twice
    repeated = 25 * 4 * 2 * 2  # in each layer that keeps them
    assert whole_row(shape, part, width=2) == 2 * whole
    # Of a row that many share, two copies of all embeddings are more than what a rank keeps of its token.
    many = RowPart.of(Work(tokens=100, pairs=causal_pairs(100)), 100)
    options: dict[str, Any] = {"width": 2, "checkpointing": True, "tower_trained": True, "logits_bytes": 0}
    assert activations(shape, many, **options) == 2 * 2 * 100 * 16
    assert exchanged_heads(shape, part, width=2, checkpointing=True) == 2 * (twice + repeated)
    assert exchanged_heads(shape, part, width=2, checkpointing=False) == 2 * (twice + 3 * repeated)


def test_a_cached_token_has_keys_and_values_of_each_layer_and_no_head_is_split(models: Callable[[str], Path]):
    from transformers import AutoConfig

    shape = model_shape(AutoConfig.from_pretrained(models("qwen2")))
    whole = 2 * shape.layers * 2 * shape.head_size * 2
    assert cache_bytes_per_token(shape, width=2, pipeline_parallel=shape.layers) * shape.layers == (
        cache_bytes_per_token(shape, width=2)
    )
    assert [cache_bytes_per_token(shape, width=2, tensor_parallel=n) for n in (1, 2, 4)] == [
        whole,
        whole // 2,
        whole // 2,
    ]
    assert cache_bytes_per_sequence(shape, width=2) == 0
    linear = model_shape(AutoConfig.from_pretrained(models("qwen3_5_text")))
    assert cache_bytes_per_token(linear, width=2) == 2 * 1 * 2 * 64 * 2  # one layer of two attends
    # A state of 128 x 128 for each of two heads of values, and three inputs of 2 x 128 + 2 x 128 channels.
    assert cache_bytes_per_sequence(linear, width=2) == 2 * 128 * 128 * 4 + 3 * 512 * 2
    assert layer_activations(shape, 4) > layer_activations(shape, 2) and patch_activations(shape, 4) == 0


@pytest.mark.parametrize("completions", [(512, 512), (64,) * 8, (16, 300, 7, 900), (900,)])
def test_the_mask_of_a_shared_prompt_is_as_large_as_attention_makes_it(completions: tuple[int, ...]) -> None:
    unit = Unit(tuple(range(len(completions))), 3072, completions)
    row = PackedLayout(unit.spans(0), "cpu", torch.float32)
    made = sum(block.bias_N1LM.numel() for block in row.blocks.blocks if block.bias_N1LM is not None)
    assert unit.masked_pairs <= made <= 1.25 * unit.masked_pairs
    if completions == (512, 512):
        assert made == 1024 * 4096  # both in one call
