"""A model's shape, for counting its operations, from its Hugging Face config."""

from __future__ import annotations

from typing import Any

from mmrl.engine.network.family import FAMILIES
from mmrl.ops.cost import LinearAttentionShape, MixtureShape, ModelShape


def model_shape(config: Any) -> ModelShape:
    """The shape of a transformers config of any family in ``family.FAMILIES``."""
    text, images = config.get_text_config(), FAMILIES[config.model_type].images
    return ModelShape(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=getattr(text, "intermediate_size", 0),  # none where all layers are mixtures of experts
        vocabulary=text.vocab_size,
        normed_heads=text.model_type.startswith("qwen3"),
        tower=None if images is None else images(config).tower,
        gated_heads=getattr(text, "attn_output_gate", text.model_type.startswith("qwen3_5")),
        mixture=_mixture(text),
        linear=_linear(text),
    )


def mixed_layers(config: Any) -> list[int]:
    """Numbers of the layers that have a mixture of experts, in a transformers config."""
    text = config.get_text_config()
    dense, every = getattr(text, "mlp_only_layers", None) or (), getattr(text, "decoder_sparse_step", 1)
    layers = range(text.num_hidden_layers if getattr(text, "num_experts", 0) else 0)
    return [layer for layer in layers if layer not in dense and (layer + 1) % every == 0]


def _mixture(text: Any) -> MixtureShape | None:
    layers = mixed_layers(text)
    if not layers:
        return None
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    return MixtureShape(len(layers), text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size, shared)


def _linear(text: Any) -> LinearAttentionShape | None:
    layers = (getattr(text, "layer_types", None) or ()).count("linear_attention")
    if not layers:
        return None
    return LinearAttentionShape(
        layers,
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    )
