"""A model's shape, for counting its operations, from its Hugging Face config."""

from __future__ import annotations

from typing import Any

from mmrl.ops.cost import MixtureShape, ModelShape, TowerShape


def model_shape(config: Any) -> ModelShape:
    """The shape of a transformers config of any family in ``family.FAMILIES``."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    return ModelShape(
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=text.intermediate_size,
        vocabulary=text.vocab_size,
        normed_heads=text.model_type.startswith("qwen3"),
        tower=None if vision is None else _tower(config.model_type, vision),
        mixture=_mixture(text),
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
    return MixtureShape(len(layers), text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size)


def _tower(model_type: str, vision: Any) -> TowerShape:
    if model_type == "qwen2_vl":  # here alone the hidden size is that of the language model
        width, out, mlp_width = vision.embed_dim, vision.hidden_size, int(vision.embed_dim * vision.mlp_ratio)
    else:
        width, out, mlp_width = vision.hidden_size, vision.out_hidden_size, vision.intermediate_size
    windowed = model_type == "qwen2_5_vl"
    return TowerShape(
        layers=vision.depth,
        width=width,
        mlp_width=mlp_width,
        mlp_matrices=3 if windowed else 2,
        patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merge=vision.spatial_merge_size,
        out=out,
        mergers=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
        windowed_layers=vision.depth - len(vision.fullatt_block_indexes) if windowed else 0,
        heads=vision.num_heads,
        window=vision.window_size // (vision.patch_size * vision.spatial_merge_size) if windowed else 0,
    )
