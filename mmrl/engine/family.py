"""One record per model family: everything that mmrl must know about an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mmrl.engine.image_form import ImageForm, OneGrid, Tiles
from mmrl.errors import ConfigError

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        model_type: ``model_type`` in the folder's config.json.
        models: Public names of models that belong to it, for people who choose one.
        images: How its models read images; None for text models.
        parts: Name prefixes of the parameters of ``vision``, ``projector`` and ``language``; the longest wins.
        banned_tokens: Never sampled: the policy would otherwise write an image that does not exist.
        languages: ``model_type`` of the language models that it may have, where its models differ in that.
        shares_prefix: True if completions of one prompt may share its keys and values in a packed row. False for layers
            that hand a state from token to token, such as linear attention.
    """

    model_type: str
    models: str
    images: type[ImageForm] | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({"language": ("",)}))
    banned_tokens: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    shares_prefix: bool = True

    @property
    def vision(self) -> bool:
        """True if prompts may hold images."""
        return self.images is not None

    def part_of(self, parameter: str) -> str:
        """The part that a parameter belongs to."""
        matches = [(len(p), part) for part, prefixes in self.parts.items() for p in prefixes if parameter.startswith(p)]
        return max(matches)[1]


def _qwen_vl(model_type: str, models: str, *projectors: str) -> Family:
    parts = {
        "vision": ("model.visual.",),
        "projector": tuple(f"model.visual.{name}." for name in projectors),
        "language": ("model.language_model.", "lm_head."),
    }
    return Family(model_type, models, images=OneGrid, parts=MappingProxyType(parts), banned_tokens=VISION_TOKENS)


_INTERNVL = Family(
    "internvl",
    "InternVL3 and InternVL3.5 in Hugging Face's format (-hf, -HF), with Qwen2.5 or Qwen3, not its mixtures of experts",
    images=Tiles,
    parts=MappingProxyType(
        {
            "vision": ("model.vision_tower.",),
            "projector": ("model.multi_modal_projector.",),
            "language": ("model.language_model.", "lm_head."),
        }
    ),
    banned_tokens=(*VISION_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    languages=("qwen2", "qwen3"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            _qwen_vl("qwen2_vl", "Qwen2-VL", "merger"),
            _qwen_vl("qwen2_5_vl", "Qwen2.5-VL", "merger"),
            _qwen_vl("qwen3_vl", "Qwen3-VL, not its mixtures of experts", "merger", "deepstack_merger_list"),
            _INTERNVL,
            Family("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
            Family("qwen3", "Qwen3, not its mixtures of experts"),
            Family("llama", "Llama 3 to 3.3 without vision, DeepSeek-R1-Distill-Llama"),
        )
    }
)


def family_of(model_type: str | None, path: str) -> Family:
    """The family that a config.json's ``model_type`` names.

    Raises:
        ConfigError: It is not supported.
    """
    family = FAMILIES.get(model_type or "")
    if family is None:
        raise ConfigError(
            f"models of type {model_type!r} are not supported" if model_type else "config.json names no model_type",
            where=f"model.path: {path}",
            possible="; ".join(f"{family.model_type} ({family.models})" for family in FAMILIES.values()),
            remedy="choose a model of one of these families",
        )
    return family
