"""A model's shape, for counting its operations, from its Hugging Face config."""

from __future__ import annotations

from typing import Any

from mmrl.engine.network.family import FAMILIES
from mmrl.ops.cost import ModelShape
from mmrl.ops.layer_shapes import LinearAttentionShape, MixtureShape, UnevenLayers


def model_shape(config: Any) -> ModelShape:
    """The shape of a transformers config of any family in ``family.FAMILIES``."""
    text, images = config.get_text_config(), FAMILIES[config.model_type].images
    first = text.per_layer_config[0] if _is_uneven(text) else text
    return ModelShape(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=first.num_key_value_heads,
        head_size=getattr(first, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=getattr(text, "intermediate_size", 0),  # none where all layers are mixtures of experts
        vocabulary=text.vocab_size,
        normed_heads=text.model_type.startswith("qwen3"),
        tower=None if images is None else images(config).tower,
        gated_heads=getattr(text, "attn_output_gate", text.model_type.startswith("qwen3_5")),
        mixture=_mixture(text),
        linear=_linear(text),
        window=text.sliding_window if (local := local_layers(text)) else 0,
        local_layers=local,
        uneven=_uneven(text) if _is_uneven(text) else None,
    )


def local_layers(text: Any) -> int:
    """The number of layers with a window, in a language model's config."""
    return int((getattr(text, "layer_types", None) or ()).count("sliding_attention"))


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


def _is_uneven(text: Any) -> bool:
    """True if a language model's attention differs in size from layer to layer."""
    return bool(text.model_type == "gemma4_text")


def _uneven(text: Any) -> UnevenLayers:
    """The layers of Gemma 4: wider heads where all tokens are seen, keys and values of an earlier layer, wider MLPs."""
    width, shared_from = text.hidden_size, text.num_hidden_layers - text.num_kv_shared_layers
    weights = whole = local = 0
    for number, kind in enumerate(text.layer_types):
        layer = text.per_layer_config[number]
        heads = text.num_attention_heads * layer.head_dim
        own, shares = layer.num_key_value_heads * layer.head_dim, number >= shared_from
        kept = 0 if shares else own if text.attention_k_eq_v and kind == "full_attention" else 2 * own
        mlp = text.intermediate_size * (1 + (text.use_double_wide_mlp and shares))
        weights += width * (2 * heads + kept + 3 * mlp + 2 * (text.hidden_size_per_layer_input or 0))
        whole, local = (whole, local + heads) if kind == "sliding_attention" else (whole + heads, local)
    inputs = text.num_hidden_layers * (text.hidden_size_per_layer_input or 0)
    largest = inputs * text.vocab_size_per_layer_input
    kv_heads = tuple(sorted({layer.num_key_value_heads for layer in text.per_layer_config}))
    return UnevenLayers(weights, whole, local, outside=width * inputs, largest=largest, kv_heads=kv_heads)


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
