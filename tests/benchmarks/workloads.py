"""What the benchmarks work on: a model folder of some 30 million random parameters, JPEG images, prompts, one reward,
pairs of answers.

The model is random, and still ends its completions as asked: its vocabulary is cut into stages, a token's successor is
of the same stage or, with a probability that the head's weights set, of the next one, and after the last stage comes
the end of the sequence. Lengths are then sampled, by whoever samples, from one distribution: a sum of as many geometric
ones as there are stages. With no stages a completion never ends by itself.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_PIXELS, MAX_PIXELS = 3136, 1_100_000
VOCABULARY = 32000
CELL = 28
"""Pixels of an image token's side: patch size times merge size."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long completions are.

    Attributes:
        most: They are cut there.
        least: Few are shorter.
        mean: Of the lengths before they are cut; 0 is always ``most``.
        stages: The more, the narrower: the standard deviation is about mean / sqrt(stages).
    """

    most: int
    least: int
    mean: int = 0
    stages: int = 0

    @classmethod
    def fixed(cls, length: int) -> Lengths:
        return cls(length, length)

    @property
    def name(self) -> str:
        return f"mean{self.mean}-{self.stages}" if self.mean else "endless"


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of training step.

    Attributes:
        image: Side in pixels; 0 is text only.
        text: Prompt tokens besides the image's.
        group: Completions of a prompt.
        prompts: Prompts of a step.
    """

    name: str
    what: str
    image: int
    text: int
    group: int
    prompts: int
    lengths: Lengths

    @property
    def image_tokens(self) -> int:
        return round(self.image / CELL) ** 2

    @property
    def prompt_tokens(self) -> int:
        return self.text + self.image_tokens

    @property
    def family(self) -> str:
        return "qwen2_5_vl" if self.image else "qwen3"

    @property
    def model(self) -> str:
        """The name of its model's folder."""
        return f"{self.family}-{self.lengths.name}"


@dataclass(frozen=True, slots=True)
class PairWorkload(Workload):
    """A training step on pairs of answers that the data has; nothing is sampled.

    Attributes:
        freeze: Parts of the model that are not trained.
    """

    freeze: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return f"{self.family}-plain"


TABLE = {
    w.name: w
    for w in (
        Workload("image-448", "image 448, G = 8, completions 16 to 64", 448, 44, 8, 2, Lengths(64, 16, 40, 10)),
        Workload("image-1024", "image 1024, G = 8, completion 32", 1024, 44, 8, 1, Lengths.fixed(32)),
        Workload("geometry3k", "prompt 400 with image, G = 5, completions 300 to 800", 448, 144, 5, 2,
                 Lengths(800, 300, 520, 20)),
        Workload("text", "text only, prompt 256, G = 8, completion 128", 0, 256, 8, 4, Lengths.fixed(128)),
    )
}  # fmt: skip
"""The rows with a target."""


PAIRS = {
    w.name: w
    for w in (
        PairWorkload("dpo-image-448", "image 448, answers of 16 to 64", 448, 44, 2, 4, Lengths(64, 16)),
        PairWorkload("dpo-image-448-frozen", "image 448, answers of 16 to 64, vision tower frozen", 448, 44, 2, 4,
                     Lengths(64, 16), ("vision", "projector")),
        PairWorkload("dpo-text", "prompt 256, answers of 64 to 256", 0, 256, 2, 4, Lengths(256, 64)),
        PairWorkload("dpo-text-long", "prompt 128, answers of 128 to 512", 0, 128, 2, 4, Lengths(512, 128)),
    )
}  # fmt: skip
"""Pairs of answers."""


def grid(group: int = 8, image: int = 448, completion: int = 32, prompts: int = 1) -> Workload:
    """A point of a sweep."""
    what = f"image {image}, G = {group}, completion {completion}"
    return Workload(f"g{group}-i{image}-r{completion}", what, image, 44, group, prompts, Lengths.fixed(completion))


SWEEP = {w.name: w for w in (grid(g, i, r) for i in (224, 448, 1024) for g in (4, 8, 16) for r in (32, 128))}


def reward(rollouts: Any) -> list[float]:
    """For mmrl; see ``score``."""
    return [score(rollout.text) for rollout in rollouts]


def score(completion: str) -> float:
    """The share of vowels: cheap, and never the same in a whole group."""
    return sum(completion.count(vowel) for vowel in "aeiou") / max(len(completion), 1)


def write_all(folder: Path, workload: Workload, rows: int, *, tiny: bool = False) -> tuple[Path, Path]:
    """Model folder and data file (jsonl, images beside it) of a workload; what is there already is used again.

    Args:
        rows: Prompts, each with an image of its own.
        tiny: A model of 2 million parameters, to try the benchmark itself.
    """
    pairs = isinstance(workload, PairWorkload)
    model = folder / f"{workload.model}{'-tiny' if tiny else ''}"
    if not (model / "config.json").exists():
        write_model(model, workload.family, None if pairs else workload.lengths, tiny=tiny)
    of_pairs = f"-pairs{workload.lengths.least}-{workload.lengths.most}" if pairs else ""
    data = folder / f"{workload.family}-{workload.image}-{workload.text}-{rows}{of_pairs}" / "train.jsonl"
    if not data.exists():
        write_data(data, model, workload, rows)
    return model, data


def write_model(folder: Path, family: str, lengths: Lengths | None, *, tiny: bool = False) -> None:
    """Weights in float32, config, tokenizer and, for a vision-language family, the processor.

    Args:
        lengths: Of the completions that are sampled; None where none are.
    """
    import torch
    import transformers

    from mmrl.engine.aids.tiny_model import ROPE, VISION_TOKENS

    tokenizer = _write_tokenizer(folder, vision=family == "qwen2_5_vl")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    hidden, layers = (64, 2) if tiny else (256, 6 if family == "qwen2_5_vl" else 12)
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    text = {
        **shape,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    values: dict[str, Any] = text
    if family == "qwen2_5_vl":
        text["rope_parameters"] |= ROPE[family]
        del text["head_dim"]
        tower = {
            **shape,
            "out_hidden_size": hidden,
            "depth": layers,
            "num_heads": hidden // 32,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 4 * CELL,
            "fullatt_block_indexes": [layers // 2 - 1, layers - 1],
        }
        values = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
        values |= {"text_config": text, "vision_config": tower, "tie_word_embeddings": False}
        _write_processor(folder, tokenizer)
    torch.manual_seed(0)
    vision = family == "qwen2_5_vl"
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(family, **values)).float()
    if lengths is not None:
        _write_stages(model, tokenizer, lengths)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[end], pad_token_id=pad)
    model.save_pretrained(folder)


def _write_stages(model: Any, tokenizer: Any, lengths: Lengths) -> None:
    """Make the random model end its completions after ``lengths``; see the top of this file."""
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocabulary, hidden = embedding.shape
    stages = max(lengths.stages, 1)
    stage_V = torch.arange(vocabulary) % stages
    special = sorted({*tokenizer.added_tokens_decoder, *tokenizer("\n", add_special_tokens=False)["input_ids"]})
    stage_V[special] = 0
    axes = torch.eye(stages, hidden)  # of the stages; the other dimensions are noise

    def noise() -> Any:
        values = torch.randn(vocabulary, hidden)
        values[:, :stages] = 0
        return values / values.norm(dim=1, keepdim=True)

    # After the last norm, the state's part along its token's stage is 0.8 sqrt(hidden), and scores of the head's noise
    # have a variance of about 1.
    along, gain = 0.8 * math.sqrt(hidden), 1 / 0.6
    never = -20.0 / along * axes.sum(0)
    with torch.no_grad():
        embedding.copy_(math.sqrt(hidden) * (0.8 * axes[stage_V] + 0.6 * noise()))
        head.copy_(16.0 / along * axes[stage_V] + gain * noise())
        head[special] = never
        if lengths.mean:
            move = stages / lengths.mean
            onward = 16.0 + math.log(move / (1 - move))
            later = (stage_V > 0).nonzero()[:, 0]
            head[later] += onward / along * axes[stage_V[later] - 1]
            whole_stage = onward + math.log(vocabulary / stages) + 0.5  # of the mean of exp(noise)
            head[tokenizer.eos_token_id] = never + (whole_stage + 20.0) / along * axes[-1]


def _write_tokenizer(folder: Path, *, vision: bool) -> Any:
    """A byte-level BPE tokenizer of 32,000 tokens, learned from words of random syllables, in Qwen's chat format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from mmrl.engine.aids.tiny_model import SPECIAL_TOKENS, save_tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" " + word for word in words(60000)), trainer)
    return save_tokenizer(tokenizer, folder, vision=vision)


def _write_processor(folder: Path, tokenizer: Any) -> None:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template
    )
    processor.save_pretrained(folder)


def words(count: int, seed: int = 0) -> list[str]:
    """Random words of two to four syllables."""
    import numpy as np

    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    return ["".join(rng.choice(syllables, rng.integers(2, 5))) for _ in range(count)]


def write_data(path: Path, model: Path, workload: Workload, rows: int) -> None:
    """Rows of a question, exactly as many tokens as asked, a JPEG file and a pair of answers."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    # What the chat template and an image's two marks take.
    empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    frame = len(tokenizer(empty)["input_ids"]) + (2 if workload.image else 0)
    vocabulary = words(20000, seed=1)
    lines = []
    for row in range(rows):
        ids = tokenizer(" " + " ".join(vocabulary[row::rows][: workload.text]))["input_ids"]
        question = tokenizer.decode(ids[: workload.text - frame])
        line: dict[str, Any] = {"question": question, "answer": ""}
        if isinstance(workload, PairWorkload):
            rng = np.random.default_rng([row, workload.lengths.most])
            for name in ("chosen", "rejected"):
                length = int(rng.integers(workload.lengths.least, workload.lengths.most))  # and what ends it
                ids = tokenizer(" ".join(rng.choice(vocabulary, length)))["input_ids"]
                line[name] = tokenizer.decode(ids[:length])
        if workload.image:
            name = f"{row:04d}.jpg"
            draw(row, workload.image).save(path.parent / name, quality=90)
            line |= {"question": "<image>" + question, "images": [name]}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


def draw(seed: int, side: int) -> Any:
    """Coloured shapes on a soft, grainy ground: as much for a JPEG decoder as a photograph."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFilter

    rng = np.random.default_rng([seed, side])
    ground = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(ground)
    for _ in range(12):
        x, y, size = (int(v) for v in rng.integers(0, side, 3))
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        shape = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        shape((x, y, x + size // 3, y + size // 3), fill=colour)
    grain = Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).filter(ImageFilter.GaussianBlur(2))
    return Image.blend(ground, grain, 0.2)
