"""Bytes of a rank: states by hand, activations against what autograd keeps on real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.engine.shape import model_shape
from mmrl.ops.memory import States, activations, cache_bytes_per_token, layer_activations, patch_activations, states

M = 10**6


@pytest.mark.parametrize(
    ("width", "zero_stage", "ranks", "offload", "expected"),
    [
        (4, 0, 2, "none", States(12 * M, 0, 16 * M, 8 * M, 0, 0, 16 * M, 0)),
        (2, 1, 2, "none", States(6 * M, 4 * M, 8 * M, 4 * M, 0, 0, 12 * M, 0)),
        (2, 2, 2, "none", States(6 * M, 4 * M, 8 * M, 4 * M, 0, 0, 12 * M, 0)),
        (4, 3, 4, "none", States(3 * M, 0, 4 * M, 2 * M, 0, 12 * M, 4 * M, 0)),
        (2, 3, 2, "optimizer", States(3 * M, 0, 0, 0, 0, 6 * M, 0, 28 * M)),
        (2, 3, 2, "parameters", States(0, 0, 0, 0, 0, 6 * M, 0, 31 * M)),
    ],
)
def test_states_of_two_million_trained_and_one_million_frozen_weights(width, zero_stage, ranks, offload, expected):
    assert states(2 * M, M, width=width, zero_stage=zero_stage, ranks=ranks, offload=offload) == expected


def test_a_reference_is_whole_on_every_rank():
    assert states(2 * M, M, width=2, zero_stage=3, ranks=8, reference=True).reference == 6 * M


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3"])
def test_activations_are_about_what_autograd_keeps(family: str, dtype: str, models: Callable[[str], Path]) -> None:
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
    if vision:
        grids = ((1, 24, 24),)
        ids[:, :144] = config.image_token_id
        inputs |= {
            "pixel_values": torch.randn(576, 1176, dtype=getattr(torch, dtype)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    work = shape.work(tokens=count, pairs=0, predicted=0, images=grids)
    options = {"width": 2 if dtype == "bfloat16" else 4, "tower_trained": True, "logits_bytes": 0}
    expected = activations(shape, work, checkpointing=False, **options)
    assert expected == pytest.approx(kept_bytes(model, inputs), rel=0.35)
    assert activations(shape, work, checkpointing=True, **options) < expected


def test_a_cached_token_has_keys_and_values_of_each_layer_and_no_head_is_split(models: Callable[[str], Path]):
    from transformers import AutoConfig

    shape = model_shape(AutoConfig.from_pretrained(models("qwen2")))
    whole = 2 * shape.layers * 2 * shape.head_size * 2
    assert [cache_bytes_per_token(shape, width=2, tensor_parallel=n) for n in (1, 2, 4)] == [
        whole,
        whole // 2,
        whole // 2,
    ]
    assert layer_activations(shape, 4) > layer_activations(shape, 2) and patch_activations(shape, 4) == 0
