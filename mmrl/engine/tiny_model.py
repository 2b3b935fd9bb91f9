"""Tiny random models as Hugging Face folders, for self-checks and demonstrations; nothing is downloaded.

0.6 million parameters, the architecture and file layout of the real ones: enough to learn handwritten digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
VISION = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}

MROPE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [4, 6, 6]},
    "qwen2_5_vl": {"mrope_section": [4, 6, 6]},
    "qwen3_vl": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}

# What differs in a folder that is as the hub's.
HUB_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_hidden_layers": 3},  # one more than take features from deep in the tower
    "llama": {"pad_token_id": None},
}
HUB_ROPE: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,  # short, so that the scaling matters to prompts of tests
    },
}  # fmt: skip
HUB_VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 1]},
}
HUB_TOKENIZER: dict[str, dict[str, Any]] = {
    "llama": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "pad_token": None},
}
FLAT = ("qwen2_vl", "qwen2_5_vl")  # config.json has the language model's keys at its top


def write_tokenizer(folder: Path, *, vision: bool) -> Any:
    """A byte-level BPE tokenizer of about 500 tokens, digits one by one, with Qwen's special tokens and chat format."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    extra = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **({"extra_special_tokens": extra} if vision else {}),
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def write_model(
    folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0, as_on_hub: bool = False, **text_overrides: Any
) -> Path:
    """Write weights, config, tokenizer and (for a vision-language family) the processor's files; return the folder.

    Args:
        as_on_hub: As the family's large models lie on the hub: bfloat16 in several files, a head of its own, their
            RoPE, and the file layouts of transformers 4. Otherwise float32 in one file, with a tied head.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    vision = family.endswith("_vl")
    tokenizer = write_tokenizer(folder, vision=vision and not as_on_hub)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        **TEXT,
        "vocab_size": len(tokenizer) + 6,  # padded, as the real ones are
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": not as_on_hub,
        **(HUB_TEXT.get(family, {}) if as_on_hub else {}),
        **text_overrides,
    }
    if vision or as_on_hub:
        rope = {"rope_type": "default", "rope_theta": 1e6 if as_on_hub else 1e4, **MROPE.get(family, {})}
        text["rope_parameters"] = rope | (HUB_ROPE.get(family, {}) if as_on_hub else {})
    config_class, model_class = _classes(family)
    if vision:
        vision_config = _vision_config(family) | (HUB_VISION.get(family, {}) if as_on_hub else {})
        config = config_class(
            text_config=text,
            vision_config=vision_config,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=text["tie_word_embeddings"],
        )
        _write_processor(folder, family, vision_config["patch_size"])
    else:
        config = config_class(**text)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16 if as_on_hub else torch.float32)
    model.save_pretrained(folder, **({"max_shard_size": "400KB"} if as_on_hub else {}))
    # What the hub's folders carry: sampling defaults that training must not inherit, and two end tokens.
    defaults = {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.1,
        "top_k": 1,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2))
    if as_on_hub:
        _age_config(folder / "config.json", family)
        _age_tokenizer(folder, family)
        if vision:
            _age_processor(folder, family)
    return folder


def _classes(family: str) -> tuple[Any, str]:
    import transformers

    stems = {
        "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL",
        "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama",
    }  # fmt: skip
    stem = stems[family]
    head = "ForConditionalGeneration" if family.endswith("_vl") else "ForCausalLM"
    return getattr(transformers, f"{stem}Config"), stem + head


def _vision_config(family: str) -> dict[str, Any]:
    if family == "qwen2_vl":
        return {**VISION, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
    if family == "qwen3_vl":
        return {
            **VISION, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128,
            "num_position_embeddings": 256, "deepstack_visual_indexes": [0],
        }  # fmt: skip
    return {
        **VISION, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128, "window_size": 112,
        "fullatt_block_indexes": [1],
    }  # fmt: skip


def _write_processor(folder: Path, family: str, patch_size: int) -> None:
    names = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": names[family],
        "size": {"shortest_edge": 3136, "longest_edge": 50176},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48, 0.45, 0.40],
        "image_std": [0.26, 0.26, 0.27],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))


def _age_config(path: Path, family: str) -> None:
    """The keys that transformers 4 wrote: RoPE in two, the element type under its older name."""
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
        vision["in_chans"] = vision.pop("in_channels")
        del vision["rope_parameters"]
    path.write_text(json.dumps(config, indent=2))


def _age_tokenizer(folder: Path, family: str) -> None:
    """The chat template among the tokenizer's settings; for some families, a first token that the tokenizer adds."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= HUB_TOKENIZER.get(family, {"tokenizer_class": "Qwen2Tokenizer"})
    settings["chat_template"] = CHAT_TEMPLATE
    if first := settings.get("bos_token"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        settings["chat_template"] = "{{ bos_token }}" + CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").unlink()


def _age_processor(folder: Path, family: str) -> None:
    """Bounds of an image's size by their older names, and the chat template in a file of its own."""
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    if family in FLAT:
        size = settings.pop("size")
        settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    path.write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


def _corpus() -> Iterator[str]:
    for a in range(30):
        for b in range(30):
            yield f"what is {a}+{b}? the answer is {a + b}. \\boxed{{{a + b}}}"
    yield from ["What digit is this?", "What is the sum?", "How many red circles are there in the image?"] * 50
    yield from ["count the blue squares and green triangles <think> </think> user assistant system"] * 50
