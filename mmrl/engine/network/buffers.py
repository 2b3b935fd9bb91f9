"""Numbers that belong to a model's files and are never trained, such as Gemma 4's factors of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """A transformers model's buffers that its files hold, by their state-dict names."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def read_buffers(model: Any, folder: Path) -> None:
    """Fill these buffers from a folder's files; those that no file has stay as the model makes them."""
    from safetensors import safe_open

    wanted = saved_buffers(model)
    for path in sorted(folder.glob("*.safetensors")) if wanted else ():
        with safe_open(path, framework="pt") as file:
            for name in wanted.keys() & set(file.keys()):
                wanted[name].copy_(file.get_tensor(name))
