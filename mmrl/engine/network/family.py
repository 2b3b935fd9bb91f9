"""One record per model family: everything that mmrl must know about an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mmrl.engine.device import DeviceKind
from mmrl.engine.network.features import BFLOAT16_STATES, FEATURES, PAGE, PROMPT_EACH, READS_TEXT, Feature, Limit
from mmrl.engine.network.image_form import Budget, ImageForm, OneGrid, Tiles
from mmrl.errors import ConfigError

UNUSED = "unused"
"""The part of a parameter that no row reaches."""
SCORE_WEIGHT = "score.weight"
"""The weight of a reward model's head; it counts as the language model's, and is trained whatever is frozen."""
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of a layer's expert weights, where all of its experts are in one."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        model_type: ``model_type`` in the folder's config.json.
        models: Public names of models that belong to it, for people who choose one.
        images: How its models read images; None for text models.
        parts: Name prefixes of the parameters of ``vision``, ``projector`` and ``language``; the longest wins.
        unused: Name prefixes of parameters that no row of ours reaches, such as those of sound. They are frozen, have
            no adapters, and are kept in what is saved.
        banned_tokens: Never sampled: the policy would otherwise write an image that does not exist.
        languages: ``model_type`` of the language models that it may have, where its models differ in that.
        shares_prefix: True if completions of one prompt may share its keys and values in a packed row, and its last
            states in layers that hand a state from token to token (``linear_attention``).
        limits: Features that the family lacks, such as ``{"vllm": Limit("refused", "...", device="cpu")}``; those that
            follow from ``vision`` and ``shares_prefix`` need no entry.
        mixture: True if layers are mixtures of experts.
        transposed_experts: True if files have the experts' matrices the other way round; see ``turned_in_files``.
    """

    model_type: str
    models: str
    images: type[ImageForm] | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({"language": ("",)}))
    unused: tuple[str, ...] = ()
    banned_tokens: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    shares_prefix: bool = True
    limits: Mapping[Feature, Limit] = field(default_factory=lambda: MappingProxyType({}))
    mixture: bool = False
    transposed_experts: bool = False

    @property
    def all_limits(self) -> Mapping[Feature, Limit]:
        """The limits, with those that follow from other fields, in the order of ``FEATURES``."""
        found: dict[Feature, Limit] = {} if self.vision else {"vision_once": READS_TEXT}
        found |= {} if self.shares_prefix else {"sharing": PROMPT_EACH}
        found |= self.limits
        return {feature: found[feature] for feature in FEATURES if feature in found}

    def limit(self, feature: Feature, device: DeviceKind | None, precision: str | None) -> Limit | None:
        """The limit of a feature on a kind of device in a precision; with None, only one that holds for all of them."""
        found = self.all_limits.get(feature)
        return found if found is not None and found.holds(device, precision) else None

    def refusal(
        self, asked: Mapping[Feature, str], device: DeviceKind | None, precision: str | None
    ) -> ConfigError | None:
        """An error if a run asks for a feature that the family does not have; it has the table's line.

        Args:
            asked: The answer of ``asked_features``.
            device: The kind of device that the engines run on; None if it is not known yet.
            precision: Likewise ``float32`` or ``bfloat16``.
        """
        for feature, where in asked.items():
            limit = self.limit(feature, device, precision)
            if limit is not None and limit.kind == "refused":
                other = " or model.dtype" if limit.precision else ""
                return ConfigError(
                    f"models of type {self.model_type} have no {FEATURES[feature]}: {limit.reason}",
                    where=where,
                    possible=self.line,
                    remedy=f"change this setting{other}; {PAGE} says what is proven",
                )
        return None

    @property
    def line(self) -> str:
        """The family's line of the table as a text: its models and limits."""
        limits = "; ".join(f"{FEATURES[feature]} {limit}" for feature, limit in self.all_limits.items())
        return f"{self.model_type} ({self.models})" + (f": {limits}" if limits else "")

    @property
    def vision(self) -> bool:
        """True if prompts may hold images."""
        return self.images is not None

    def uses(self, parameter: str) -> bool:
        """True if rows reach a parameter."""
        return not parameter.startswith(self.unused)

    def part_of(self, parameter: str) -> str:
        """The part that a parameter belongs to; ``unused`` for one that no row reaches."""
        if not self.uses(parameter):
            return UNUSED
        if parameter.startswith(SCORE_WEIGHT.removesuffix("weight")):
            return "language"
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
    return Family(
        model_type,
        models,
        images=OneGrid,
        parts=MappingProxyType(parts),
        banned_tokens=VISION_TOKENS,
        **facts,
    )


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

_GEMMA4 = Family(
    "gemma4",
    "Gemma 4, dense, with images; not its mixtures of experts; sound is not read",
    images=Budget,
    parts=MappingProxyType(
        {
            "vision": ("model.vision_tower.",),
            "projector": ("model.embed_vision.",),
            "language": ("model.language_model.", "lm_head."),
        }
    ),
    unused=("model.audio_tower.", "model.embed_audio."),
    banned_tokens=(
        *("<|image>", "<|image|>", "<image|>", "<|video|>"),
        *("<|audio>", "<|audio|>", "<audio|>"),
    ),
    languages=("gemma4_text",),
)

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
            _qwen_vl(
                "qwen3_5",
                "Qwen3.5, Qwen3.6 and Qwen3.8, dense",
                "merger",
                limits=MappingProxyType({"vllm": BFLOAT16_STATES}),
            ),
            Family(
                "qwen3_5_text",
                "Qwen3.5, Qwen3.6 and Qwen3.8 without vision, dense",
                limits=MappingProxyType({"vllm": BFLOAT16_STATES}),
            ),
            _INTERNVL,
            _GEMMA4,
            _qwen_vl(
                "qwen3_5_moe",
                "Qwen3.5 and Qwen3.6, mixtures of experts",
                "merger",
                limits=MappingProxyType({"vllm": BFLOAT16_STATES}),
                mixture=True,
            ),
            Family("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
            Family("qwen3", "Qwen3, dense"),
            Family("qwen3_moe", "Qwen3, mixtures of experts", mixture=True),
            Family("llama", "Llama 3 to 3.3 without vision, DeepSeek-R1-Distill-Llama"),
        )
    }
)


def family_of(model_type: str | None, where: str) -> Family:
    """The family that a config.json's ``model_type`` names.

    Raises:
        ConfigError: It is not supported.
    """
    family = FAMILIES.get(model_type or "")
    if family is None:
        raise ConfigError(
            f"models of type {model_type!r} are not supported" if model_type else "config.json names no model_type",
            where=where,
            possible="".join(f"\n    {family.line}" for family in FAMILIES.values()),
            remedy=f"choose a model of one of these families; {PAGE} says what is proven for each",
        )
    return family
