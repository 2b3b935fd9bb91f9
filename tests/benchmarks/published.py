"""Model folders at published sizes: config and processor as on the hub, random weights, a tokenizer of as many tokens.

Files are written one by one, so that no more of the model than one of them is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

TOKENS = 151_643
"""Of Qwen2.5's tokenizer, without its special tokens, which come next; the embedding has more rows than both."""

_QWEN2: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_VISION_IDS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_PATCHES = {
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B-Instruct": {
        **_QWEN2,
        **_VISION_IDS,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            **_PATCHES,
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    },
    "Qwen2.5-0.5B-Instruct": {
        **_QWEN2,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "transformers_version": "4.43.1",
    },
    "Qwen2.5-3B-Instruct": {
        **_QWEN2,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "transformers_version": "4.43.1",
    },
    "Qwen2-VL-2B-Instruct": {
        **_QWEN2,
        **_VISION_IDS,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            **_PATCHES,
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 1536,
            "mlp_ratio": 4,
            "num_heads": 16,
        },
    },
}
"""config.json of the hub's folders."""

PROCESSOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "temporal_patch_size": 2,
}
"""preprocessor_config.json, without the processor's class."""


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with two narrow layers, and the vocabulary as it is."""
    small = dict(config) | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    if tower := config.get("vision_config"):
        small["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
        small["vision_config"] = tower | {"depth": 2, "num_heads": 4, "hidden_size": 128}
        if "embed_dim" in tower:
            small["vision_config"] |= {"embed_dim": 64}
        else:
            small["vision_config"] |= {
                "hidden_size": 64,
                "intermediate_size": 128,
                "out_hidden_size": 128,
                "fullatt_block_indexes": [1],
            }
    return small


def write_model(folder: Path, config: Mapping[str, Any], *, dtype: str, mean_length: int, seed: int = 0) -> Path:
    """Write a model folder, if it is not there; returns it.

    Weights are drawn as they are before training: normal with the config's standard deviation, norms 1. Of such a
    model every token is about as likely; so many of them end a completion that one has ``mean_length`` on average, and
    lengths are geometric.

    Args:
        dtype: Of the weights: ``float32`` or ``bfloat16``.
    """
    if (folder / "model.safetensors.index.json").is_file():  # the last to be written
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2))
    _write_tokenizer(folder, vision="vision_config" in config)
    if "vision_config" in config:
        name = config["architectures"][0].replace("ForConditionalGeneration", "Processor")
        (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "processor_class": name}, indent=2))
    ends = range(0, TOKENS, mean_length)
    generation = {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "repetition_penalty": 1.05}
    generation |= {"eos_token_id": [151645, 151643, *ends], "temperature": 0.1, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    _write_weights(folder, dtype, config["initializer_range"], seed)
    return folder


def _write_weights(folder: Path, dtype: str, deviation: float, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    from mmrl.engine.network.folder import INDEX, ModelFolder
    from mmrl.engine.network.sizes import meta_model
    from mmrl.engine.network.weights import shards

    element = getattr(torch, dtype)
    weights = dict(meta_model(ModelFolder.open(str(folder), with_weights=False)).named_parameters())
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str) -> Any:
        shape = weights[name].shape
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape, dtype=element)
        return torch.empty(shape).normal_(0.0, deviation, generator=generator).to(element)

    files = shards({name: weight.numel() * element.itemsize for name, weight in weights.items()})
    where = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({_on_disk(name): draw(name) for name in names}, folder / file, {"format": "pt"})
        where.update({_on_disk(name): file for name in names})
    size = sum(weight.numel() for weight in weights.values()) * element.itemsize
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))


def _on_disk(name: str) -> str:
    """A weight's name in the hub's files: they know nothing of the language model beside the tower."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def _write_tokenizer(folder: Path, *, vision: bool) -> None:
    """Byte-level BPE of two, three and four letters, with Qwen's special tokens at their published ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from mmrl.engine.aids.tiny_model import SPECIAL_TOKENS, save_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges = []
    for left, right in _pairs():
        if len(vocabulary) == TOKENS:
            break
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    save_tokenizer(tokenizer, folder, vision=vision)


def _pairs() -> Iterator[tuple[str, str]]:
    """Pairs of tokens to merge, in order; the last kind has more than there is room for."""
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = [a + b for a in letters for b in letters]
    yield from ((a, b) for a in letters for b in letters)
    yield from ((pair, letter) for pair in pairs for letter in letters)
    yield from ((left, right) for left in pairs for right in pairs)


def write_data(folder: Path, rows: int, *, images: bool) -> Path:
    """Rows of a question of uneven length and, with ``images``, a photograph of a megapixel as a JPEG file."""
    from workloads import words

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, photograph = words(2000, seed=1), _photographs() if images else None
    lines = []
    for row in range(rows):
        question = " ".join(vocabulary[row::rows][: 8 + 11 * (row % 4)])
        line: dict[str, Any] = {"question": question, "answer": ""}
        if photograph is not None:
            name = f"{row:03d}.jpg"
            photograph(row).save(folder / name, quality=90)
            line |= {"question": f"<image>{question}", "images": [name]}
        lines.append(json.dumps(line))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "train.jsonl"


def _photographs() -> Callable[[int], Any]:
    """scikit-learn's two photographs, a part of one for each row, enlarged to 1,120 x 896: 1,280 image tokens."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = [Image.fromarray(pixels) for pixels in load_sample_images().images]

    def photograph(row: int) -> Any:
        left = 13 * (row // 2) % 140
        return found[row % 2].resize((1120, 896), Image.Resampling.BICUBIC, (left, 0, left + 500, 400))

    return photograph
