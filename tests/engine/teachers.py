"""Models that teach a family's tiny one: other weights, other sizes, another number of rows in the embedding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

ROWS = 32
"""Further rows of a teacher's embedding; none has a token."""
TOWERS = (".visual.", ".vision_tower.", ".multi_modal_projector.")


def write_teacher(folder: Path, source: Path, *, seed: int = 1, tower: bool = False, **text: Any) -> Path:
    """A model with the source's tokenizer and processor, and weights of its own.

    Args:
        tower: True to keep the source's vision tower and projector.
        text: Other settings of its language model.
    """
    import transformers

    shutil.copytree(source, folder)
    config = transformers.AutoConfig.from_pretrained(source)
    kind = "AutoModelForImageTextToText" if hasattr(config, "vision_config") else "AutoModelForCausalLM"
    auto = getattr(transformers, kind)
    kept = auto.from_pretrained(source).state_dict()
    language = config.get_text_config()
    for name, value in {"vocab_size": language.vocab_size + ROWS, **text}.items():
        setattr(language, name, value)
    if "num_hidden_layers" in text and getattr(language, "layer_types", None):
        language.layer_types = [language.layer_types[0]] * text["num_hidden_layers"]
    torch.manual_seed(seed)
    model = auto.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if tower and any(part in f".{name}" for part in TOWERS):
                weight.copy_(kept[name])
            elif weight.dim() > 1:
                weight.mul_(3.0)  # else its distribution is nearly flat
    model.save_pretrained(folder)
    return folder
