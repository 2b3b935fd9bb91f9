"""Tiny random models as Hugging Face folders, for self-checks and demonstrations; nothing is downloaded.

They have the architecture and file layout of the real ones, in two sizes: 0.6 million parameters are enough to read
handwritten digits, 1 million to read a labelled figure and to work an answer out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mmrl.engine.aids.tiny_templates import chat_template
from mmrl.engine.network.family import FAMILIES

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}

TILE_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

BUDGET_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Widths and depths of the language model, and the width of the vision tower."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    tower: int

    def text(self) -> dict[str, int]:
        """Part of a text config."""
        return {name: value for name, value in asdict(self).items() if name != "tower"}

    def vision(self, family: str) -> dict[str, Any]:
        """Part of a vision config."""
        if family == "qwen2_vl":
            return {"embed_dim": self.tower, "hidden_size": self.hidden_size}
        widths = {"hidden_size": self.tower, "intermediate_size": 2 * self.tower}
        if family in TILED:
            return widths
        if family in BUDGETED:
            return {**widths, "head_dim": self.tower // VISION[family]["num_attention_heads"]}
        return {**widths, "out_hidden_size": self.hidden_size}


TILED = ("internvl",)
"""Families whose images are tiles."""
BUDGETED = ("gemma4",)
"""Families whose images have about as many tokens each."""
SIZES = {"tiny": Size(128, 256, 2, 4, 64), "small": Size(192, 384, 2, 6, 64)}
TEXT = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
LINEAR_ATTENTION = {
    "head_dim": 64, "full_attention_interval": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
WINDOWS = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 32, "global_head_dim": 64,
    "hidden_size_per_layer_input": 16, "final_logit_softcapping": 4.0,
}  # fmt: skip
LANGUAGE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe"), LINEAR_ATTENTION),
    "gemma4": WINDOWS,
}
"""Further settings of a family's language model. vLLM's linear attention takes heads of 128 on a CPU."""
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "internvl": "InternVLProcessor",
    "gemma4": "Gemma4Processor",
}
"""Names of a family's processor in transformers."""

TOWER = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**TOWER, "mlp_ratio": 2},
    "qwen2_5_vl": {**TOWER, "window_size": 112, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]},
    "qwen3_5": {**TOWER, "num_position_embeddings": 256},
    "qwen3_5_moe": {**TOWER, "num_position_embeddings": 256},
    "qwen3_vl_moe": {**TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]},
    "internvl": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": [14, 14], "image_size": [56, 56],
        "attention_bias": True,
    },
    "gemma4": {
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "patch_size": 12,
        "pooling_kernel_size": 2, "position_embedding_size": 160, "standardize": True, "use_clipped_linears": True,
        "default_output_length": 70,  # vLLM's name for the most tokens of an image
    },
}  # fmt: skip
SOUND: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 32, "use_clipped_linears": True,
    },
}  # fmt: skip
"""Towers that hear, which no row uses."""
IMAGE_SEQ_LENGTH = 4
"""Tokens of a tile of 56 x 56 pixels."""

PARTIAL_ROPE = {"partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
ROPE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [4, 6, 6]},
    "qwen2_5_vl": {"mrope_section": [4, 6, 6]},
    "qwen3_vl": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "qwen3_5": PARTIAL_ROPE,
    "qwen3_5_text": PARTIAL_ROPE,
    "qwen3_5_moe": PARTIAL_ROPE,
    "qwen3_vl_moe": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}

_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {**_EXPERTS, "head_dim": 128},
    "qwen3_5_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [], "decoder_sparse_step": 1},
}
"""Mixtures of experts, in place of layers' MLPs."""


def write_tokenizer(
    folder: Path,
    *,
    vision: bool,
    geometry: bool = False,
    family: str = "qwen2_5_vl",
    words: Sequence[str] = (),
) -> Any:
    """A byte-level BPE tokenizer of about 500 tokens, digits one by one, with Qwen's special tokens and chat format.

    With ``geometry``, its merges are those of worked solutions. ``family`` has special tokens of its own if its images
    are tiles. Each of ``words`` is one token at the beginning of a turn.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    own = {} if family not in (*TILED, *BUDGETED) else image_tokens(family)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL_TOKENS, *own.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    corpus = _geometry_corpus() if geometry else _corpus()
    tokenizer.train_from_iterator(chain(corpus, [*words] * 1000), trainer)
    return save_tokenizer(tokenizer, folder, vision=vision, family=family)


def image_tokens(family: str) -> dict[str, str]:
    """A vision-language family's special tokens around images, by the names that its processor asks for."""
    return TILE_TOKENS if family in TILED else BUDGET_TOKENS if family in BUDGETED else VISION_TOKENS


def save_tokenizer(tokenizer: Any, folder: Path, *, vision: bool, family: str = "qwen2_5_vl") -> Any:
    """Write a tokenizer's files, with Qwen's special tokens and chat format; return transformers' object."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **({"extra_special_tokens": image_tokens(family)} if vision else {}),
    )
    fast.chat_template = chat_template(family)
    fast.save_pretrained(folder)
    return fast


def write_model(
    folder: Path,
    family: str = "qwen2_5_vl",
    *,
    size: str = "tiny",
    seed: int = 0,
    words: Sequence[str] = (),
    gain: float = 1.0,
) -> Path:
    """Write weights, config, tokenizer and (for a vision-language family) the processor's files; return the folder.

    ``size`` is one of ``SIZES``; all but tiny have geometry in their tokenizer's corpus, to which ``words`` add.
    ``gain`` multiplies the random matrices of layers. Their usual standard deviation, 0.02, is for models of billions:
    in one so narrow it leaves attention and MLPs nearly linear, and what needs both of them takes long to be found.
    Weights are float32 in one file, with a tied head, in the layout of the installed transformers.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    vision = family in VISION
    tokenizer = write_tokenizer(folder, vision=vision, geometry=size != "tiny", family=family, words=words)
    named = (*SPECIAL_TOKENS, *image_tokens(family).values())
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in named}
    values = text = {
        **TEXT,
        **SIZES[size].text(),
        **LANGUAGE.get(family, {}),
        **EXPERTS.get(family, {}),
        "vocab_size": len(tokenizer) + 6,  # padded, as the real ones are
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
    if family in ROPE:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **ROPE[family]}
    if vision:
        if family in TILED:
            text["model_type"] = "qwen2"
            values = {"image_token_id": ids["<IMG_CONTEXT>"], "image_seq_length": IMAGE_SEQ_LENGTH}
        elif family in BUDGETED:
            text["vocab_size_per_layer_input"] = text["vocab_size"]
            values = {f"{name}_id": ids[token] for name, token in BUDGET_TOKENS.items() if name != "eoa_token"}
            values["eoa_token_index"] = ids[BUDGET_TOKENS["eoa_token"]]
        else:
            values = {f"{name}_id": ids[token] for name, token in VISION_TOKENS.items()}
        tower = {**VISION[family], **SIZES[size].vision(family)}
        values |= {"text_config": text, "vision_config": tower, "tie_word_embeddings": True}
        write_processor(folder, family)
    torch.manual_seed(seed)
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model(family, **values)
    model = auto.from_config(config)
    if family in SOUND:  # whose weights are drawn last
        hearing = auto.from_config(transformers.AutoConfig.for_model(family, **values, audio_config=SOUND[family]))
        hearing.load_state_dict(model.state_dict(), strict=False)
        model = hearing
    model = model.to(torch.float32)
    _widen(model, gain)
    fill_scales(model, family)
    model.save_pretrained(folder)
    turn_experts(folder, family)
    # As in the hub's folders: sampling defaults that training must not inherit, and two end tokens.
    defaults = {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.1,
        "top_k": 1,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2))
    return folder


def _widen(model: Any, gain: float) -> None:
    """Multiply the matrices of layers; embeddings and the head stay."""
    from torch.nn import Conv3d, Linear

    for module in model.modules():
        if isinstance(module, Linear | Conv3d) and module is not model.get_output_embeddings():
            module.weight.data *= gain


def fill_scales(model: Any, family: str) -> None:
    """Give numbers that are saved and never trained, such as factors of layers, values as trained models have them.

    Gemma 4 divides no scores by the size of a head: its norms of queries learn to. With norms of 1 the attention of a
    random model is so sharp that gradients in float32 have three right digits.
    """
    import torch

    if family not in BUDGETED:
        return
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.fill_(len(parameter) ** -0.5)
    generator = torch.Generator().manual_seed(0)
    trained = {name for name, _ in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name in trained or name not in model.state_dict():
            continue
        drawn = 0.1 * torch.rand(buffer.shape, generator=generator)
        bound = {"min": -6.0, "max": 6.0}.get(name[-3:])
        buffer.copy_(drawn if name.endswith("bias") else 0.9 + drawn if bound is None else bound + drawn)


def turn_experts(folder: Path, family: str) -> None:
    """Give the experts' weights that ``save_pretrained`` has written the layout of the hub's files."""
    from safetensors.torch import load_file, save_file

    if not FAMILIES[family].transposed_experts:
        return
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name in filter(FAMILIES[family].turned_in_files, weights):
            weights[name] = weights[name].transpose(1, 2).contiguous()
        save_file(weights, path, metadata=dict(format="pt"))  # noqa: C408, as in ``weights.save_weights``


def write_processor(
    folder: Path, family: str, *, max_pixels: int = 50176, patch_size: int = TOWER["patch_size"]
) -> None:
    """Write the processor's settings of a vision-language family."""
    if family in BUDGETED:
        sizes = {name: VISION[family][name] for name in ("patch_size", "pooling_kernel_size")}
        image = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, **sizes}
        video = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, **sizes}
        nested = {
            "processor_class": PROCESSORS[family],
            "image_seq_length": 70,
            "image_processor": image,
            "video_processor": video,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        }
        (folder / "processor_config.json").write_text(json.dumps(nested, indent=2))
        return
    settings: dict[str, Any] = {
        "processor_class": PROCESSORS[family],
        "image_mean": [0.48, 0.45, 0.40],
        "image_std": [0.26, 0.26, 0.27],
    }
    if family in TILED:
        height, width = VISION[family]["image_size"]
        processor = {"processor_class": settings["processor_class"], "image_seq_length": IMAGE_SEQ_LENGTH}
        (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))
        settings |= {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": height, "width": width},
            "crop_to_patches": False,  # as on the hub: the processor cuts all the same
            "min_patches": 1,
            "max_patches": 12,
        }
    else:
        settings |= {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 3136, "longest_edge": max_pixels},
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
        }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))


def _corpus() -> Iterator[str]:
    for a in range(30):
        for b in range(30):
            yield f"what is {a}+{b}? the answer is {a + b}. \\boxed{{{a + b}}}"
    yield from ["What digit is this?", "What is the sum?", "How many red circles are there in the image?"] * 50
    yield from ["count the blue squares and green triangles <think> </think> user assistant system"] * 50


def _geometry_corpus() -> Iterator[str]:
    for a in range(2, 20):
        for b in range(2, 20):
            yield f"AC = {a} and BC = {b}, so AB^2 = AC^2 + BC^2 = {a}^2 + {b}^2 = {a * a} + {b * b}."
            yield f"AB = {a}, BC = {b}, CD = {a}. AD^2 = AC^2 + {b}^2. AD = \\sqrt {{ {a} }} = {b} \\sqrt {{ 2 }}."
            yield f"x: {a} - {b} = {a - b}. The area is \\frac {{ {a} }} {{ {b} }}, {a} \\cdot {b}. \\boxed{{{a}}}"
    yield from ["Find AB.", "Find AD.", "Find the angle at C in degrees. Find the area of the triangle."] * 50
    yield from ["The angle at C is right. Check: the angles of a triangle add up to 180 degrees."] * 50
    yield from _corpus()
