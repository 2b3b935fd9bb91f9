"""An update on ranks that hold rows together, or on one that holds whole rows; each runs in a fork.

Groups of ranks have different rows, and each rank of a group the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.config.load import from_mapping
from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.packed_inputs import PackedInputs
from mmrl.engine.rank import RankEngine
from mmrl.engine.spec import EngineSpec
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Sample
from mmrl_algorithms.grpo import GRPO
from tests.engine.sharded_ranks import ADVANTAGES, episodes, samples
from tests.engine.test_learner import first_moment


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: A model's folder.
        played: True for episodes, with holes, and with images in their observations if the model reads any.
        size: Ranks that hold a row together.
        sections: Of the config, beside the model's.
    """

    model: Path
    played: bool = False
    size: int = 1
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What a rank finds: log-probs of its samples by their numbers, the gradient of all ranks, metrics."""

    logprobs: dict[int, list[float]]
    gradient: dict[str, torch.Tensor]
    metrics: dict[str, float]
    cut_images: int
    """Cuts between ranks, of all rows of the update, that go through an image."""


def learned(case: Case, folder: Path) -> Found:
    """One optimizer step of a case."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    opened = ModelFolder.open(str(case.model))
    sections: dict[str, Any] = {
        "model": {"path": str(case.model), "dtype": "float32"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "grpo"},
        "learner": {
            "lr": 1e-30,
            "max_grad_norm": 1e9,
            "tokens_per_microbatch": 60 if ranks > 1 else 10_000,
            "sequence_parallel_size": case.size,
            "zero_stage": 3 if ranks > 1 else 0,
            "router_aux_loss_coef": 0.05 if opened.family.mixture else 0.0,
            "deepspeed": {"optimizer": {"params": {"betas": [0.0, 0.999]}}},
        },
        "cluster": {"name": "ray", "ranks": ranks} if ranks > 1 else {},
    }
    for name, values in case.sections.items():
        sections[name] = sections.get(name, {}) | values
    media = MediaStore(folder / f"media-{ranks}-{rank}", opened.image_sizes(3136, 50176))
    spec = EngineSpec(from_mapping(sections), opened, media, GRPO(GRPO.Config()), 1, with_sampler=False)
    engine = RankEngine(spec, "cpu")
    made: list[Sample] = (episodes if case.played else samples)(opened, media)
    masks = [sample.mask for sample in made]
    advantages = [np.full(len(mask), value) for mask, value in zip(masks, ADVANTAGES, strict=True)]
    order = np.arange(len(made))
    rows = training_rows(made, masks, {"advantages": advantages}, order, Aggregation("token-mean"), order.tolist())
    groups = ranks // case.size
    own = [number for number in rows if min(number % 3, groups - 1) == rank // case.size]
    with engine.learning() as learner:
        network = learner.network("policy")
        cuts = count_cut_images(learner.trained, opened.image_token_id)
        scored = network.score([made[number] for number in own])
        result = network.update([rows[number] for number in own])
        gradient = {name: values.clone() for name, values in first_moment(learner).items()}
    return Found(
        {number: values.tolist() for number, values in zip(own, scored, strict=True)},
        gradient,
        dict(result.metrics),
        len(cuts),
    )


def count_cut_images(network: Any, image_token_id: int) -> list[int]:
    """The places, one for each, of later cuts that go through an image."""
    cuts: list[int] = []

    def note(_: Any, args: Any) -> None:
        if isinstance(args[0], PackedInputs):
            is_image_S = args[0].model_inputs["input_ids"][0] == image_token_id
            inner = network.group.bounds(len(is_image_S))[1:-1]
            cuts.extend(place for place in inner if is_image_S[place - 1] and is_image_S[place])

    network.policy.register_forward_pre_hook(note)
    return cuts


def learn(_: Any, cases: list[Case], folder: Path) -> list[Found]:
    """The steps of some cases, one after the other."""
    torch.distributed.init_process_group("gloo")
    found = [learned(case, folder) for case in cases]
    torch.distributed.destroy_process_group()
    return found
