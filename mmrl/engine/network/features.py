"""Features that a model family has, has in another way, or lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind

Feature = Literal[
    "hf",
    "vllm",
    "packing",
    "sharing",
    "vision_once",
    "lora",
    "tensor_parallel",
    "zero_3",
    "sequence",
    "checkpoint",
    "turns",
]
FEATURES: Mapping[Feature, str] = MappingProxyType(
    {
        "hf": "sampler `hf`",
        "vllm": "sampler `vllm`",
        "packing": "packing",
        "sharing": "shared prompt",
        "vision_once": "vision once",
        "lora": "LoRA",
        "tensor_parallel": "TP",
        "zero_3": "ZeRO 3",
        "sequence": "SP",
        "checkpoint": "checkpoint",
        "turns": "turns",
    }
)
"""The columns of the table of families."""
PAGE = "mmrl/engine/FAMILIES.md"
"""The table of families; the tests' results and this module's records are its source."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A feature that a family does not have, or has in another way.

    Attributes:
        kind: With ``refused``, a run that asks for the feature ends before its engines start. With ``fallback``, it
            goes another way.
        reason: Why, in words that end a line of the table.
        device: The only kind of device with this limit; None for all.
        precision: The only precision with this limit, ``float32`` or ``bfloat16``; None for both.
    """

    kind: Literal["refused", "fallback"]
    reason: str
    device: DeviceKind | None = None
    precision: str | None = None

    def __str__(self) -> str:
        where = {None: "", "cpu": " on a CPU", "cuda": " on a GPU"}[self.device]
        return f"{self.kind}{where}{f' in {self.precision}' if self.precision else ''}: {self.reason}"

    def holds(self, device: DeviceKind | None, precision: str | None) -> bool:
        """True if the limit holds there; None for what is not known yet."""
        return self.device in (None, device) and self.precision in (None, precision)


BFLOAT16_STATES = Limit("refused", "its linear attention computes in bfloat16 alone", "cpu", "float32")
READS_TEXT = Limit("refused", "reads text only")
PROMPT_EACH = Limit("fallback", "each completion is packed with a prompt of its own")


def asked_features(config: Config, *, samples: bool = True, learns: bool = True) -> dict[Feature, str]:
    """The features that a config asks for, each with the setting that does.

    Args:
        samples: True if the run samples.
        learns: True if the run trains.
    """
    sampler, learner, model = config.sampler, config.learner, config.model
    asked: dict[Feature, str] = {}
    if samples:
        asked[sampler.name] = f"sampler.name: {sampler.name}"
        if sampler.tensor_parallel_size > 1:
            asked["tensor_parallel"] = f"sampler.tensor_parallel_size: {sampler.tensor_parallel_size}"
    if learns:
        if learner.share_prefix == "auto":
            asked["sharing"] = "learner.share_prefix"
        if learner.zero_stage == 3:
            asked["zero_3"] = "learner.zero_stage: 3"
        if learner.sequence_parallel_size > 1:
            asked["sequence"] = f"learner.sequence_parallel_size: {learner.sequence_parallel_size}"
        if model.lora is not None:
            asked["lora"] = "model.lora"
    return asked
