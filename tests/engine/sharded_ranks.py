"""One of two ranks at ZeRO 3, in a process of its own, or a single one without ZeRO.

Each rank learns from its rows of one optimizer step, model after model; of a model that reads images, then from
episodes with images in observations, of which one rank has none. Rank 0 writes the gradient of each step to
``FOLDER/STEP-RANKS.safetensors``, where STEP is the model's name, or that and ``-episodes``.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from mmrl.config.load import from_mapping
from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.engine.text.encoding import Encoder
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import EncodedPrompt, Message, Prompt, RawImage, Sample, Segment
from mmrl_algorithms.grpo import GRPO

LENGTHS = (4, 30, 7, 3, 11, 24, 6)
ADVANTAGES = (1.0, -0.5, 2.0, 0.7, -1.5, 0.3, -0.8)
OF_RANK_1 = (3, 6)
"""Rank 0 has more rows, so rank 1 adds rows of weight zero."""
TEXT_OF_RANK_1 = (2, 5)
"""Episodes of rank 1, which have no image."""


def noise(width: int, height: int) -> RawImage:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return RawImage(buffer.getvalue(), "noise")


def samples(folder: ModelFolder, media: MediaStore) -> list[Sample]:
    prompts = [Prompt("text", (Message("user", "what is 3+4?"),))]
    if folder.family.vision:
        prompts.append(Prompt("image", (Message("user", "<image>What digit is this?"),), (noise(60, 90),)))
    encoded, rng = [Encoder(folder, media).encode(prompt) for prompt in prompts], np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(folder.vocabulary.size), folder.vocabulary.banned)
    made = []
    for number, length in enumerate(LENGTHS):
        segment = Segment(rng.choice(allowed, length).astype(np.int32), True, np.zeros(length, np.float32))
        made.append(Sample(encoded[number // 2 % len(encoded)], (segment,)))
    return made


def episodes(folder: ModelFolder, media: MediaStore) -> list[Sample]:
    """Episodes of a text prompt and of one with an image; observations show images, the prompt's own among them."""
    text, image = [sample.prompt for sample in samples(folder, media)[1:3]]
    own, shown = noise(60, 90), noise(120, 60)
    encoder, rng = Encoder(folder, media), np.random.default_rng(2)
    allowed = np.setdiff1d(np.arange(folder.vocabulary.size), folder.vocabulary.banned)

    def segment(part: int | tuple[str, tuple[RawImage, ...]]) -> Segment:
        if isinstance(part, int):
            return Segment(rng.choice(allowed, part).astype(np.int32), True, np.zeros(part, np.float32))
        seen = encoder.encode(Prompt("seen", (Message("user", part[0]),), part[1]))
        return Segment(seen.token_ids, False, np.zeros(len(seen.token_ids), np.float32), images=seen.images)

    played: list[tuple[EncodedPrompt, list[Any]]] = [
        (image, [3, ("<image>", (shown,)), 5]),
        (image, [7]),
        (text, [2, ("no image", ()), 9]),
        (text, [4, ("<image><image>", (shown, own)), 2, ("<image>", (own,)), 3]),
        (image, [2, ("<image> again", (own,)), 8]),
        (text, [6]),
        (text, [1, ("<image>", (shown,)), 20]),
    ]
    return [Sample(prompt, tuple(map(segment, parts))) for prompt, parts in played]


def learned(model: Path, folder: Path, ranks: int, rank: int) -> dict[str, dict[str, float]]:
    """An optimizer step, or two; returns the metrics of each."""
    from deepspeed.utils import safe_get_full_optimizer_state

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
    steps = {model.name: (samples(opened, media), OF_RANK_1)}
    if opened.family.vision:
        steps[f"{model.name}-episodes"] = episodes(opened, media), TEXT_OF_RANK_1
    metrics = {}
    for name, (made, of_rank_1) in steps.items():
        masks = [sample.mask for sample in made]
        advantages = [np.full(len(mask), value) for mask, value in zip(masks, ADVANTAGES, strict=True)]
        order = np.arange(len(made))
        rows = training_rows(made, masks, {"advantages": advantages}, order, Aggregation("token-mean"), order.tolist())
        own = [row for number, row in rows.items() if ranks == 1 or (number in of_rank_1) == bool(rank)]
        with engine.learning() as learner:
            metrics[name] = dict(learner.network("policy").update(own).metrics)
            named = dict(learner.policy.model.named_parameters())
            state = learner.trained.engine.optimizer.state
            gradients = {
                key: (safe_get_full_optimizer_state(p, "exp_avg") if ranks > 1 else state[p]["exp_avg"]).contiguous()
                for key, p in named.items()
            }
        if rank == 0:
            save_file(gradients, folder / f"{name}-{ranks}.safetensors")
    return metrics


def learn(_: Any, folder: Path, models: list[Path]) -> dict[str, dict[str, float]]:
    """The metrics of each step, on one of the ranks."""
    torch.distributed.init_process_group("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    found: dict[str, dict[str, float]] = {}
    for model in models:
        found |= learned(model, folder, ranks, rank)
    torch.distributed.destroy_process_group()
    return found
