"""The section of the config that says what the policy is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mmrl.config.base import MAY_CHANGE, Contradiction, Section, Text


class LoraConfig(Section):
    """Low-rank adapters (LoRA) beside linear layers, whose weights stay as they are."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapters' product."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """The product is scaled by alpha / rank."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] = ("language",)
    """Linear layers to adapt: language, vision, projector, ends of their names such as q_proj, patterns with *."""


class ModelConfig(Section):
    """The policy."""

    path: Annotated[Text, MAY_CHANGE]
    """A Hugging Face model folder, or a name on the hub."""
    revision: Annotated[Text | None, MAY_CHANGE] = None
    """Branch, tag or commit of a model on the hub; null is its default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Field(strict=False)] = ()
    """Parts that are not trained: any of vision, projector, language."""
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = True
    """Recompute activations in the backward pass, for less memory and more time."""
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of the weights; null trains the weights."""
    quantize: Literal["nf4"] | None = None
    """nf4: beside adapters, keep the weights of the language model's linear layers in 4 bits in the learner (QLoRA)."""
    trust_remote_code: Annotated[bool, MAY_CHANGE] = False
    """Run Python code that comes with the model's folder."""

    def contradictions(self) -> Iterator[Contradiction]:
        if len(set(self.freeze)) == 3:
            yield Contradiction(("freeze",), "model.freeze leaves nothing to train", "leave out at least one part")
        if self.freeze and self.lora:
            what = "model.lora trains its adapters and no weight, so there is nothing to freeze"
            remedy = "remove model.freeze, and name the layers in model.lora.targets"
            yield Contradiction(("freeze", "lora"), what, remedy)
        if self.quantize and not self.lora:
            what = "weights in 4 bits cannot be trained, and model.lora is null, so there is nothing to train"
            yield Contradiction(("quantize", "lora"), what, "set model.lora, or remove model.quantize")
