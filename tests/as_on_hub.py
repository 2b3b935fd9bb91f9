"""Makes a tiny model's folder as a family's large models lie on the hub.

bfloat16 in several files, a head of its own, their RoPE, and the file layouts of transformers 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmrl.engine.aids.tiny_model import BUDGET_TOKENS, TILE_TOKENS, fill_scales, turn_experts, write_tokenizer
from mmrl.engine.aids.tiny_templates import chat_template

TEXT: dict[str, dict[str, Any]] = {
    "internvl": {"model_type": "qwen3"},  # the other language model that it may have
    "qwen3_vl": {"num_hidden_layers": 3},  # one more than take features from deep in the tower
    "qwen3_5": {"num_hidden_layers": 3, "full_attention_interval": 2},
    "qwen3_5_text": {"num_hidden_layers": 3, "full_attention_interval": 2},
    "qwen3_5_moe": {"num_hidden_layers": 3, "full_attention_interval": 2},
    "qwen3_vl_moe": {"num_hidden_layers": 3, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "llama": {"pad_token_id": None},
    "gemma4": {  # the larger models: keys that are values, nothing shared
        "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # short, so that the scaling matters to prompts of tests
    },
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "internvl": {"num_hidden_layers": 3},
    "qwen3_vl": {"depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": {"depth": 3, "patch_size": 16},
    "qwen3_5_moe": {"depth": 3, "patch_size": 16},
    "qwen3_vl_moe": {"depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 1]},
}
TOKENIZER: dict[str, dict[str, Any]] = {
    "internvl": {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": TILE_TOKENS},
    "llama": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "pad_token": None},
    "gemma4": {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": BUDGET_TOKENS},
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # config.json has the language model's keys at its top
FUSED = ("qwen3_5_moe",)  # its experts are one weight, which transformers would divide
NEW = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "gemma4")  # written by transformers 5
TIED = ("gemma4",)  # all of its models
DEAF = ("gemma4",)  # its larger models have no tower for sound
SLIDING = ("gemma4",)  # its RoPE is of two kinds


def age(folder: Path, family: str) -> Path:
    """Write the model anew, as on the hub; returns the folder."""
    _write_weights(folder, family)
    _config(folder / "config.json", family)
    _tokenizer(folder, family)
    if (folder / "preprocessor_config.json").exists():
        _processor(folder, family)
    return folder


def _write_weights(folder: Path, family: str) -> None:
    import torch
    import transformers

    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text.pop("layer_types", None)
    text |= TEXT.get(family, {})
    text.pop("per_layer_config", None)
    if family not in SLIDING:
        text["rope_parameters"] |= {"rope_theta": 1e6, **ROPE.get(family, {})}
    text["tie_word_embeddings"] = config["tie_word_embeddings"] = family in TIED
    config.get("vision_config", {}).update(VISION.get(family, {}))
    if family in DEAF:
        config["audio_config"] = None
    path.write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.from_pretrained(folder))
    fill_scales(model, family)
    generation = (folder / "generation_config.json").read_text()
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB", save_original_format=family not in FUSED)
    turn_experts(folder, family)
    (folder / "generation_config.json").write_text(generation)


def _config(path: Path, family: str) -> None:
    """The keys that transformers 4 wrote: RoPE in two, the element type under its older name."""
    if family in NEW:
        return
    config = json.loads(path.read_text())
    config |= {"torch_dtype": config.pop("dtype"), "transformers_version": "4.41.2"}
    text = config.pop("text_config") if family in FLAT else config.get("text_config", config)
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if len(rope) > 1 else None}
    text.pop("layer_types", None)
    if family in FLAT:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = {**text, **config, "sliding_window": 32768}
    if "vision_config" in config:
        vision = config["vision_config"]
        if family != "internvl":
            vision["in_chans"] = vision.pop("in_channels")
            del vision["rope_parameters"]
    path.write_text(json.dumps(config, indent=2))


def _tokenizer(folder: Path, family: str) -> None:
    """The chat template among the tokenizer's settings; for some families, a first token that the tokenizer adds."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(folder, vision=False, family=family)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= TOKENIZER.get(family, {"tokenizer_class": "Qwen2Tokenizer"})
    settings["chat_template"] = chat_template(family)
    if first := settings.get("bos_token"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings["chat_template"] = "{{ bos_token }}" + chat_template(family)
    (folder / "chat_template.jinja").unlink()
    if family in TIED:  # the template is a file
        (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _processor(folder: Path, family: str) -> None:
    """Bounds of an image's size by their older names, and the chat template in a file of its own."""
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings |= {name: value for name, value in VISION.get(family, {}).items() if name == "patch_size"}
    if family in FLAT:
        size = settings.pop("size")
        settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    path.write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": chat_template(family)}))
