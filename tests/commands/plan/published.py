"""Model folders of published sizes without weights: the config as published, a tiny tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.engine.aids.tiny_model import SPECIAL_TOKENS, VISION_TOKENS, write_processor, write_tokenizer


def _text(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }


_QWEN2_5_TOWER = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN3_TOWER = {
    "depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "intermediate_size": 4096, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        "qwen2_5_vl", _text(2048, 36, 16, 2, 11008, 151936, True), {**_QWEN2_5_TOWER, "intermediate_size": 3420}
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "qwen2_5_vl", _text(3584, 28, 28, 4, 18944, 152064, False), {**_QWEN2_5_TOWER, "intermediate_size": 3420}
    ),
    "Qwen/Qwen2.5-VL-32B-Instruct": (
        "qwen2_5_vl", _text(5120, 64, 40, 8, 27648, 152064, False), {**_QWEN2_5_TOWER, "intermediate_size": 3456}
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (
        "qwen3_vl", {**_text(2560, 36, 32, 8, 9728, 151936, True), "head_dim": 128}, _QWEN3_TOWER
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", _text(1536, 28, 12, 2, 8960, 151936, True), {}),
}  # fmt: skip
"""Family, language model and vision tower of each model."""


def write_published(folder: Path, name: str) -> Path:
    """Write the files that a plan reads of a model; return the folder."""
    import transformers

    family, text, tower = PUBLISHED[name]
    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder, vision=bool(tower))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = text | {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    values = text
    if tower:
        sections = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20]}[family]
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        rope |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
        values = {f"{name}_id": ids[token] for name, token in VISION_TOKENS.items()}
        values |= {"text_config": text | {"rope_parameters": rope}, "tie_word_embeddings": text["tie_word_embeddings"]}
        values["vision_config"] = tower | {"out_hidden_size": text["hidden_size"]}
        write_processor(folder, family, patch_size=tower["patch_size"])
    transformers.AutoConfig.for_model(family, **values).save_pretrained(folder)
    return folder
