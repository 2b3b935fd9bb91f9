"""A model's shape, for counting its operations, from its Hugging Face config."""

from __future__ import annotations

from typing import Any

from mmrl.engine.family import FAMILIES
from mmrl.ops.cost import ModelShape


def model_shape(config: Any) -> ModelShape:
    """The shape of a transformers config of any family in ``family.FAMILIES``."""
    text, images = config.get_text_config(), FAMILIES[config.model_type].images
    return ModelShape(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=text.intermediate_size,
        vocabulary=text.vocab_size,
        normed_heads=text.model_type.startswith("qwen3"),
        tower=None if images is None else images(config).tower,
    )
