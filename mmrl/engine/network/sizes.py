"""The number of a model's parameters, part by part, from its config alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.network.adapters import chosen_layers, linear_layers
from mmrl.engine.network.family import SCORE_WEIGHT, UNUSED
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.quantization import quantizable
from mmrl.ops.memory import NF4_BYTES
from mmrl.score_head import sequence_classification_class


def meta_model(folder: ModelFolder, *, scores: bool = False) -> Any:
    """The model without storage for its weights; ``scores``: as a reward model, with a score in place of its head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if scores:
        config = copy.deepcopy(folder.config)
        config.num_labels = 1
        with torch.device("meta"):
            return sequence_classification_class(config)(config)
    kind = AutoModelForImageTextToText if folder.family.vision else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(folder.config, trust_remote_code=folder.trust_remote_code)


def part_sizes(
    folder: ModelFolder, freeze: Sequence[str] = (), lora: LoraConfig | None = None, *, scores: bool = False
) -> dict[str, tuple[int, int]]:
    """Each part's trained and frozen parameters; adapters count to the part of their layers.

    A model whose family leaves some of it unused has a further entry for that.

    Args:
        scores: True for a reward model, whose score is trained whatever is frozen.

    Raises:
        ConfigError: ``lora.targets`` names no layer.
    """
    model, family = meta_model(folder, scores=scores), folder.family
    sizes = {part: [0, 0] for part in family.parts}
    for name, parameter in model.named_parameters():
        part = family.part_of(name)
        frozen = (part in (*freeze, UNUSED) or lora is not None) and name != SCORE_WEIGHT
        sizes.setdefault(part, [0, 0])[frozen] += parameter.numel()
    if lora is not None:
        layers = linear_layers(model)
        for name in chosen_layers(list(layers), family, lora.targets):
            layer = layers[name]
            sizes[family.part_of(f"{name}.")][0] += lora.rank * (layer.in_features + layer.out_features)
    return {part: (trained, frozen) for part, (trained, frozen) in sizes.items()}


def quantized_sizes(folder: ModelFolder) -> tuple[int, int]:
    """Parameters that ``model.quantize`` keeps in 4 bits: of all layers, and of the largest one."""
    layers = linear_layers(meta_model(folder))
    sizes = [layers[name].weight.numel() for name in quantizable(layers, folder.family)]
    return sum(sizes), max(sizes, default=0)


def weight_bytes(folder: ModelFolder, width: int, *, quantize: bool, scores: bool = False) -> list[int]:
    """Bytes of each weight as the learner holds it, with ``width`` bytes a number unless it is kept in 4 bits."""
    model = meta_model(folder, scores=scores)
    packed = set[str]()
    if quantize:
        packed = {f"{name}.weight" for name in quantizable(linear_layers(model), folder.family)}
    return [
        round(parameter.numel() * (NF4_BYTES if name in packed else width))
        for name, parameter in model.named_parameters()
    ]


def largest_adapted(folder: ModelFolder, lora: LoraConfig) -> int:
    """Parameters of the largest layer with an adapter.

    Raises:
        ConfigError: ``lora.targets`` names no layer.
    """
    layers = linear_layers(meta_model(folder))
    return max(layers[name].weight.numel() for name in chosen_layers(list(layers), folder.family, lora.targets))
