"""Rows that ranks share in a plan: what each holds, when more are proposed, and images that one rank cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.plan.proposal import propose
from mmrl.commands.plan.shared_rows import oversized_image
from mmrl.config.load import from_mapping
from mmrl.engine.device import DeviceKind
from mmrl.engine.footprint import Footprint, PlannedModel
from mmrl.engine.memory_needs import memory_changes
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.sizes import part_sizes
from mmrl.errors import ResourceError
from mmrl.ops.cost import ModelShape, Work
from mmrl.ops.memory import Zero, states
from mmrl.ops.sequence import RowPart
from mmrl_algorithms.grpo import GRPO

GB = 10**9
SHAPE = ModelShape(layers=1, width=8, heads=8, kv_heads=2, head_size=2, mlp_width=8, vocabulary=9)
RAY = {"name": "ray", "ranks": 4}


def test_ranks_that_share_a_row_hold_parts_of_it_and_its_flops_are_counted_once(plan):
    sampler = {"name": "hf", "group_size": 4, "max_new_tokens": 40}
    code, alone, err = plan(sampler=sampler, learner={"tokens_per_microbatch": 256, "zero_stage": 1})
    assert code == 0 and "shared_rows" not in alone, err
    learner = {"tokens_per_microbatch": 64, "zero_stage": 1, "sequence_parallel_size": 4}
    code, shared, err = plan(sampler=sampler, cluster=RAY, learner=learner)
    assert code == 0, err
    assert shared["step"]["row_tokens_per_update"] == alone["step"]["row_tokens_per_update"]
    assert shared["step"]["flops"] == alone["step"]["flops"]
    found = shared["shared_rows"]
    assert found["ranks"] == 4 and 64 < found["longest_row"] <= 256
    assert found["tokens_of_a_rank"] == -(-found["longest_row"] // 4)
    assert found["patches_of_a_rank"] == 24  # an image of 84 x 56 pixels is not divided
    # 4 heads of queries and outputs, 2 of keys and values that are each there twice, 32 numbers each in float32: three
    # quarters of them are other ranks'.
    assert found["exchanged_per_layer"] == found["tokens_of_a_rank"] * 4 * (4 + 4) * 2 * 32 * 3 // 4
    assert shared["learner"]["activations"] < alone["learner"]["activations"]


def test_gpus_that_ranks_of_a_row_do_not_divide_are_refused(plan):
    sizes = {"sampler": {"group_size": 4, "max_new_tokens": 10}, "cluster": RAY}
    code, _, err = plan("--gpus", "6", "--memory", "80", **sizes, learner={"sequence_parallel_size": 4})
    assert code == 2 and "is 4, which does not divide 6 ranks that learn\n  where:    --gpus 6" in err
    assert "learner.sequence_parallel_size: 1, 2, 3, 6" in err


def small(**learner: Any) -> Any:
    base = {"model": {"path": "m"}, "data": {"train": {"name": "table"}}, "algorithm": {"name": "grpo"}}
    learner = {"zero_stage": 3, "tokens_per_microbatch": 8000} | learner
    return from_mapping(base | {"learner": learner, "cluster": RAY})


def footprint(longest: int) -> Callable[[Any], Footprint]:
    """A model whose activations take a megabyte for each token that a rank holds of the largest row."""

    def take(config: Any) -> Footprint:
        learner = config.learner
        size = learner.sequence_parallel_size
        held = states(10**6, 0, width=2, zero=Zero(3, 4, learner.offload, reduce_bucket=0, float32_sums=True))
        tokens = max(learner.tokens_per_microbatch, -(-longest // size))
        return Footprint(held, tokens * 10**6, 0, 0, 0, 0, 0, 0, 0)

    return take


@pytest.mark.parametrize(
    ("memory", "longest", "expected"),
    [
        (9, 6000, {}),
        (7, 2000, {"learner.tokens_per_microbatch": 4000}),  # shorter rows serve
        (7, 6000, {"learner.sequence_parallel_size": 2, "learner.tokens_per_microbatch": 4000}),  # the row binds
        (9, 16000, {"learner.sequence_parallel_size": 2}),
        (5, 16000, {"learner.sequence_parallel_size": 4, "learner.tokens_per_microbatch": 4000}),
    ],
)
def test_more_ranks_share_a_row_only_where_it_binds(memory, longest, expected):
    take, ranks = footprint(longest), [1, 2, 4]
    sizes = {"samples": False, "smallest": longest, "row_ranks": ranks}
    assert propose(small(), SHAPE, take, memory * GB, **sizes).changes == expected


def test_a_row_that_no_ranks_hold_is_told_with_what_is_missing():
    sizes = {"samples": False, "smallest": 16000, "row_ranks": [1, 2, 4]}
    with pytest.raises(ResourceError, match=r"the smallest setting needs 4 GB of each GPU, which has 3 GB") as caught:
        propose(small(), SHAPE, footprint(16000), 3 * GB, **sizes)
    assert "micro-batches of 4000 tokens a rank, 4 of them share a row" in caught.value.where


def test_ranks_that_a_config_lets_share_a_row_are_never_fewer():
    config = small(sequence_parallel_size=2, tokens_per_microbatch=1000)
    changes = list(memory_changes(config, SHAPE, 3000, [1, 2, 4]))
    assert {each.get("learner.sequence_parallel_size", 2) for each in changes} == {2, 4}
    assert not any(each.get("learner.tokens_per_microbatch", 1000) < 750 for each in changes)


@pytest.mark.parametrize(("kind", "width"), [("cpu", 4), ("cuda", 0)])
def test_each_rank_holds_the_whole_mask_of_a_shared_prompt(kind: DeviceKind, width: int, models: Callable[[str], Path]):
    folder = ModelFolder.open(str(models("qwen2_5_vl")))
    model = PlannedModel(small(), folder, part_sizes(folder), GRPO(GRPO.Config()), kind)
    bare = Work(tokens=4096)
    held = [
        model.activations(RowPart.of(row, 4), checkpointing=True) for row in (bare, replace(bare, masked_pairs=1 << 22))
    ]
    assert held[1] - held[0] == width << 22


def test_an_image_that_one_rank_cannot_hold_is_named(models: Callable[[str], Path]):
    folder = ModelFolder.open(str(models("qwen2_5_vl")))
    config = small()
    model = PlannedModel(config, folder, part_sizes(folder), GRPO(GRPO.Config()), "cuda")
    tower = model.shape.tower
    assert tower is not None
    grids = [(1, 4, 4), (1, 400, 400)]
    room = 1_800_000_000  # 1.5 GB of them for CUDA
    assert oversized_image(config, model, grids[:1], room, samples=False) is None
    assert oversized_image(config, model, grids, 4 * GB, samples=False) is None
    assert oversized_image(config, model, grids, GB, samples=False) is None, "the weights do not fit either"
    error = oversized_image(config, model, grids, room, samples=False)
    assert error is not None and "an image of 160000 patches, 40000 tokens, needs " in error.what
    assert "data.max_pixels" in error.where and "on one rank, however many share its row" in error.what
