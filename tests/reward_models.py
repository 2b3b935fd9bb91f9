"""Tiny reward models as folders, made of a family's tiny model and a head that was drawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mmrl.engine.aids.tiny_model import turn_experts
from mmrl.engine.network.family import FAMILIES
from mmrl.score_head import as_reward_model, sequence_classification_class


def generating(folder: Path) -> Any:
    """The policy of a folder, in float32."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    images = FAMILIES[config.model_type].vision
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype="float32")


def with_score(policy: Any, *, std: float = 1.0, seed: int = 0) -> Any:
    """A policy's body with a random head."""
    import copy

    import torch

    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = sequence_classification_class(config)(config).eval()
    model.model.load_state_dict(policy.model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=std, generator=torch.Generator().manual_seed(seed))
    return model


def write_reward_model(source: Path, folder: Path, *, std: float = 1.0, seed: int = 0) -> Path:
    """Write a reward model with the body of the policy in ``source``; return its folder."""
    model = with_score(generating(source), std=std, seed=seed)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    model.save_pretrained(folder / "written")
    for path in (folder / "written").glob("*.safetensors*"):
        path.rename(folder / path.name)
    shutil.rmtree(folder / "written")
    turn_experts(folder, model.config.model_type)
    config = as_reward_model(json.loads((source / "config.json").read_text()), type(model).__name__)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
