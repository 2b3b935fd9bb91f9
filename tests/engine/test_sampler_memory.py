"""vLLM's memory beside its cache: what shapes say, and what follows for a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.sampler.sampler_memory import SamplerMemory, num_sequences, sampler_memory, weights_in_vllm
from mmrl.ops.pinned import rounded

MIB = 2**20


def config(folder: Path, **sections: Any) -> Config:
    base = {"model": {"path": str(folder)}, "data": {"train": {"name": "table"}}, "algorithm": {"name": "grpo"}}
    return from_mapping(base | sections)


@pytest.fixture
def memory(models: Callable[..., Path]) -> Callable[..., SamplerMemory]:
    """vLLM's memory for a family's tiny model in bfloat16."""

    def find(family: str, **sections: Any) -> SamplerMemory:
        return sampler_memory(config(models(family), **sections), ModelFolder.open(str(models(family))), 2)

    return find


def test_arrays_of_the_sampler_grow_with_its_sequences_and_vocabulary(memory, models):
    vocabulary = ModelFolder.open(str(models("qwen2"))).config.vocab_size
    text = memory("qwen2")
    few, many = (
        memory("qwen2", sampler={"engine": {"max_num_seqs": number, "max_num_batched_tokens": 8}})
        for number in (2, 4000)
    )
    assert 4 * 1024 * vocabulary in text.state and 4 * 4000 * vocabulary in many.state
    # Logits in bfloat16, and in float32; beside them the hidden states.
    assert many.working == pytest.approx(6 * 4000 * vocabulary, rel=1e-3) and few.working < many.working // 100
    assert many.tables[0] == 2000 * few.tables[0]


def test_an_mlp_takes_six_bytes_a_token_and_column_and_a_rank_its_part(memory, models):
    shape = ModelFolder.open(str(models("qwen2"))).config
    one, two = (
        memory("qwen2", cluster={"name": "ray", "ranks": 2}, sampler={"tensor_parallel_size": n}) for n in (1, 2)
    )
    difference = one.working - two.working
    assert difference == 8192 * 6 * shape.intermediate_size // 2
    wide = memory("qwen2", sampler={"engine": {"max_num_batched_tokens": 16384}})
    assert wide.working == 2 * one.working


def test_models_that_read_images_keep_embeddings_and_positions_of_several_axes(memory):
    text, vision, deep = memory("qwen2"), memory("qwen2_5_vl"), memory("qwen3_vl")
    assert len(text.tables) == 1 and [len(each.tables) for each in (vision, deep)] == [2, 2]
    assert vision.tables[1] == 3 * vision.tables[0]
    assert len(vision.state) == len(text.state) + 1 < len(deep.state)


def test_a_sleep_that_drops_weights_keeps_small_ones_and_the_state():
    found = SamplerMemory((100 * MIB, 1000, 30 * MIB), (5 * MIB, 2000), (3 * MIB,), 0)
    assert found.locked(discards=False) == (128 + 32 + 32 + 2 + 4) * MIB
    assert found.locked(discards=True) == (32 + 2 + 4) * MIB == rounded(20 * MIB) + 6 * MIB


def test_ranks_that_sample_together_divide_matrices_layers_and_the_prompts_of_a_step(models):
    folder = ModelFolder.open(str(models("qwen2_5_vl")))
    together = {"cluster": {"name": "ray", "ranks": 4}, "trainer": {"prompts_per_step": 10}}
    alone, halves, staged = (
        config(models("qwen2_5_vl"), **together, sampler={"group_size": 3, **sizes})
        for sizes in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
    )
    assert [num_sequences(each) for each in (alone, halves, staged)] == [9, 15, 15]
    partial = {"engine_steps": 16, "in_flight": 1.25}  # 13 prompts at once, 4 on one of four ranks
    assert num_sequences(config(models("qwen2_5_vl"), **together, sampler={"group_size": 3, "partial": partial})) == 12
    whole, half, first = (weights_in_vllm(each, folder, 2) for each in (alone, halves, staged))
    assert len(half) == len(whole) > len(first)
    assert max(half) == max(whole) // 2 and max(first) == max(whole)
    data = config(
        models("qwen2_5_vl"), **together,
        sampler={"tensor_parallel_size": 2, "engine": {"mm_encoder_tp_mode": "data"}},
    )  # fmt: skip
    assert sum(half) < sum(weights_in_vllm(data, folder, 2)) < sum(whole)
