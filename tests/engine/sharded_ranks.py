"""One of two ranks at ZeRO 3, in a process of its own, or a single one without ZeRO.

    python sharded_ranks.py FOLDER MODEL...

Each rank learns from its rows of one optimizer step, model after model. Rank 0 writes the gradient of each to
``FOLDER/MODEL-RANKS.safetensors`` and prints the metrics of each as JSON.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from PIL import Image
from safetensors.torch import save_file

from mmrl.cluster.process import forget_stale_builds
from mmrl.config.load import from_mapping
from mmrl.data.images import MediaStore
from mmrl.engine.encoding import Encoder
from mmrl.engine.folder import ModelFolder
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Message, Prompt, RawImage, Sample, Segment
from mmrl_algorithms.grpo import GRPO

LENGTHS = (4, 30, 7, 3, 11, 24, 6)
ADVANTAGES = (1.0, -0.5, 2.0, 0.7, -1.5, 0.3, -0.8)
OF_RANK_1 = (3, 6)
"""Rank 0 has more rows, so rank 1 adds rows of weight zero."""


def samples(folder: ModelFolder, media: MediaStore) -> list[Sample]:
    prompts = [Prompt("text", (Message("user", "what is 3+4?"),))]
    if folder.family.vision:
        buffer = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 60, 3), dtype=np.uint8)).save(buffer, "PNG")
        image = RawImage(buffer.getvalue(), "noise")
        prompts.append(Prompt("image", (Message("user", "<image>What digit is this?"),), (image,)))
    encoded, rng = [Encoder(folder, media).encode(prompt) for prompt in prompts], np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(folder.vocabulary.size), folder.vocabulary.banned)
    made = []
    for number, length in enumerate(LENGTHS):
        segment = Segment(rng.choice(allowed, length).astype(np.int32), True, np.zeros(length, np.float32))
        made.append(Sample(encoded[number // 2 % len(encoded)], (segment,)))
    return made


def learned(model: Path, folder: Path, ranks: int, rank: int) -> dict[str, float]:
    """One optimizer step; returns its metrics."""
    opened = ModelFolder.open(str(model))
    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "grpo"},
        "learner": {
            "lr": 1e-30,
            "max_grad_norm": 1e9,
            "tokens_per_microbatch": 60 if ranks > 1 else 10_000,
            "zero_stage": 3 if ranks > 1 else 0,
            "router_aux_loss_coef": 0.05 if opened.family.mixture else 0.0,
            "deepspeed": {"optimizer": {"params": {"betas": [0.0, 0.999]}}},
        },
        "cluster": {"name": "ray", "ranks": ranks} if ranks > 1 else {},
    }
    config = from_mapping(sections)
    media = MediaStore(folder / f"media-{ranks}-{rank}", opened.image_sizes(3136, 50176))
    engine = RankEngine(EngineSpec(config, opened, media, GRPO(GRPO.Config()), 1, with_sampler=False), "cpu")
    made = samples(opened, media)
    masks = [sample.mask for sample in made]
    advantages = [np.full(len(mask), value) for mask, value in zip(masks, ADVANTAGES, strict=True)]
    order = np.arange(len(made))
    rows = training_rows(made, masks, advantages, order, Aggregation("token-mean"), order.tolist())
    own = [row for number, row in rows.items() if ranks == 1 or (number in OF_RANK_1) == bool(rank)]
    with engine.learning() as learner:
        result = learner.update(own)
        named = dict(learner.policy.model.named_parameters())
        state = learner._engine.optimizer.state
        gradients = {
            name: (safe_get_full_optimizer_state(p, "exp_avg") if ranks > 1 else state[p]["exp_avg"]).contiguous()
            for name, p in named.items()
        }
    if rank == 0:
        save_file(gradients, folder / f"{model.name}-{ranks}.safetensors")
    return dict(result.metrics)


def main(folder: str, *models: str) -> None:
    forget_stale_builds()
    torch.distributed.init_process_group("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    found = {Path(model).name: learned(Path(model), Path(folder), ranks, rank) for model in models}
    print("\n" + json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
