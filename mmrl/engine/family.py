"""One record per model family: everything that mmrl must know about an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mmrl.errors import ConfigError

EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of a layer's expert weights, where all of its experts are in one."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        model_type: ``model_type`` in the folder's config.json.
        models: Public names of models that belong to it, for people who choose one.
        vision: True if prompts may hold images; positions are then multimodal (M-RoPE).
        parts: Name prefixes of the parameters of ``vision``, ``projector`` and ``language``; the longest wins.
        banned_tokens: Never sampled: the policy would otherwise write an image that does not exist.
        shares_prefix: True if completions of one prompt may share its keys and values in a packed row. False for layers
            that hand a state from token to token, such as linear attention.
        mixture: True if layers are mixtures of experts.
        transposed_experts: True if files have the experts' matrices the other way round; see ``turned_in_files``.
    """

    model_type: str
    models: str
    vision: bool = False
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({"language": ("",)}))
    banned_tokens: tuple[str, ...] = ()
    shares_prefix: bool = True
    mixture: bool = False
    transposed_experts: bool = False

    def part_of(self, parameter: str) -> str:
        """The part that a parameter belongs to."""
        matches = [(len(p), part) for part, prefixes in self.parts.items() for p in prefixes if parameter.startswith(p)]
        return max(matches)[1]

    def turned_in_files(self, parameter: str) -> bool:
        """True if files, and vLLM with them, have a parameter's last two dimensions the other way round."""
        return self.transposed_experts and parameter.endswith(EXPERTS)


def _qwen_vl(model_type: str, models: str, *projectors: str, **facts: Any) -> Family:
    parts = {
        "vision": ("model.visual.",),
        "projector": tuple(f"model.visual.{name}." for name in projectors),
        "language": ("model.language_model.", "lm_head."),
    }
    return Family(model_type, models, vision=True, parts=MappingProxyType(parts), banned_tokens=VISION_TOKENS, **facts)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            _qwen_vl("qwen2_vl", "Qwen2-VL", "merger"),
            _qwen_vl("qwen2_5_vl", "Qwen2.5-VL", "merger"),
            _qwen_vl("qwen3_vl", "Qwen3-VL, dense", "merger", "deepstack_merger_list"),
            _qwen_vl(
                "qwen3_vl_moe",
                "Qwen3-VL, mixtures of experts",
                *("merger", "deepstack_merger_list"),
                mixture=True,
                transposed_experts=True,
            ),
            Family("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
            Family("qwen3", "Qwen3, dense"),
            Family("qwen3_moe", "Qwen3, mixtures of experts", mixture=True),
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
