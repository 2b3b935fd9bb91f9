"""What a learner counts of its own passes, against what torch counts meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.learner.counting import UpdateMemory
from mmrl.engine.network.packed_inputs import PackedInputs, UniqueImages
from mmrl.engine.network.shape import model_shape
from mmrl.interfaces import Aggregation
from mmrl.ops.cost import Training, Work
from mmrl.ops.objective import training_rows

LENGTHS = (4, 19, 7, 3, 11, 24, 6)


def update_rows(vision: Any) -> list[Any]:
    samples = vision.samples(LENGTHS)
    masks, advantages = [sample.mask for sample in samples], [np.ones(length) for length in LENGTHS]
    return list(
        training_rows(
            samples, masks, {"advantages": advantages}, np.arange(7), Aggregation("token-mean"), range(7)
        ).values()
    )


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        ({"gradient_checkpointing": False}, 4096),
        ({"gradient_checkpointing": False, "freeze": ["vision"]}, 40),
        ({"freeze": ["vision", "projector"]}, 4096),
        ({"gradient_checkpointing": False, "lora": {"rank": 4, "targets": ["language", "projector"]}}, 4096),
    ],
    ids=str,
)
def test_an_update_counts_what_torch_counts_and_causal_attention(model, budget, start, vision, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # ZeRO 3 of another test replaces it
    engine = start(learner={"zero_stage": 1, "tokens_per_microbatch": budget}, model=model)
    rows, seen = update_rows(vision), list[Any]()
    with engine.learning() as learner:
        learner.trained.engine.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with FlopCounterMode(display=False) as counter:
            result = learner.network("policy").update(rows)
    shape = model_shape(vision.folder.config)
    freeze = model.get("freeze", ())
    training = Training(freeze)
    if "lora" in model:
        training = learner.trained._cost._training
        assert set(training.adapters) == {"language", "projector"}
    # The fused attention of a CPU is not counted by torch.
    tower = shape.tower
    images = [each for each in seen if isinstance(each, UniqueImages)]  # a frozen tower sees them before the rows
    seen = [each for each in seen if isinstance(each, PackedInputs)]
    images += [inputs.images for inputs in seen if isinstance(inputs.images, UniqueImages)]
    own = [tower.work(grid) for each in images for grid in each.grids_U3.tolist()]
    pairs = sum(inputs.model_inputs["layout"].pairs for inputs in seen)
    if len(seen) == 1:  # each prompt once, and of each completion all but its last token, which predicts nothing
        prompts = {row.sample.prompt.id: len(row.sample.prompt.token_ids) for row in rows}
        assert len(prompts) < len(rows)
        own_pairs = [
            (n - 1) * n // 2 + (n - 1) * prompts[r.sample.prompt.id] for n, r in zip(LENGTHS, rows, strict=True)
        ]
        assert pairs == sum(p * (p + 1) // 2 for p in prompts.values()) + sum(own_pairs)
    attention = shape.update_flops(
        Work(
            pairs=pairs,
            image_pairs=sum(work.image_pairs for work in own),
            window_pairs=sum(work.window_pairs for work in own),
        ),
        training,
    )
    tokens = sum(inputs.model_inputs["input_ids"].shape[1] for inputs in seen)
    again = shape.recomputed_flops(Work(tokens=tokens), training) if model.get("gradient_checkpointing", True) else 0
    # See ``backward_flops``: nothing before the first adapted layer is trained, so its inputs need no gradient.
    merged, width = sum(work.patches for work in own) // 4, 4 * tower.width
    spared = 2 * merged * width * (width + 4) if "lora" in model else 0
    assert result.flops - attention - spared == counter.get_total_flops() - again


def test_a_cpu_tells_no_memory_of_an_update(start, vision):
    with start(learner={"zero_stage": 1}).learning() as learner:
        assert learner.network("policy").update(update_rows(vision)).memory_bytes is None


def test_a_gpus_peak_is_that_of_the_block_alone(monkeypatch):
    now = SimpleNamespace(allocated=100, peak=900)
    fake = {
        "memory_allocated": lambda: now.allocated,
        "max_memory_allocated": lambda: now.peak,
        "reset_peak_memory_stats": lambda: setattr(now, "peak", now.allocated),
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    memory = UpdateMemory("cuda")
    with memory.measured():
        now.peak = 350
    assert memory.above == 250
