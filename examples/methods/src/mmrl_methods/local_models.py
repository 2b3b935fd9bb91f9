"""Models that a reward loads into its worker with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from mmrl.errors import ConfigError, first_line
from mmrl.interfaces import PluginConfig

Head = Literal["CausalLM", "TokenClassification"]


class LocalModelConfig(PluginConfig):
    """Options of a reward whose model runs in its worker."""

    path: str
    """A folder of the model and its tokenizer, or a hub id; only safetensors are read, and none of its code runs."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda where there is one."""
    max_tokens: int = Field(default=4096, gt=0)
    """Longest prompt and completion; longer ones are unscorable."""

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        kind, _, number = device.partition(":")
        if device not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
            raise ValueError("auto, cpu, cuda or cuda:N")
        return device


def loaded(config: LocalModelConfig, head: Head) -> Any:
    """The model, ready to score: float32 on a CPU, in the type of its weights on a GPU.

    Raises:
        ConfigError: There is no such model.
    """
    import torch
    import transformers

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = str(Path(config.path).expanduser())
    try:
        model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(
            folder, dtype=torch.float32 if device == "cpu" else "auto", use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise _unfit(config.path, error, f"a folder of a ...For{head} of transformers") from error
    return model.eval().to(device)


def tokenizer_of(config: LocalModelConfig) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: There is none, or it cannot tell the characters of its tokens.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(Path(config.path).expanduser()))
    except (OSError, ValueError) as error:
        raise _unfit(config.path, error, "a folder with the model's tokenizer") from error
    if not tokenizer.is_fast:
        raise ConfigError("its tokenizer does not tell the characters of its tokens", where=f"path: {config.path}")
    return tokenizer


def _unfit(path: str, error: Exception, possible: str) -> ConfigError:
    return ConfigError(f"the model cannot be read: {first_line(error)}", where=f"path: {path}", possible=possible)
