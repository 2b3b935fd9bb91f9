"""Models of published widths with random weights, and the prompts, configs and rows that train them.

Weights are drawn on the device and written as a Hugging Face folder, so that all that reads one is used as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bench import Bench

SHARD_BYTES = 2 * 10**9


@dataclass(frozen=True, slots=True)
class Widths:
    """Of a Qwen2.5 or, with a tower, a Qwen2.5-VL."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tower_layers: int
    tower_width: int
    tower_mlp: int
    tower_heads: int


QWEN_3B = Widths(36, 2048, 11008, 16, 2, 151_936, 32, 1280, 3420, 16)
TRY = Widths(3, 64, 128, 4, 2, 600, 2, 64, 128, 4)
"""For a CPU."""


def write(bench: Bench, folder: Path, widths: Widths, *, vision: bool, grown_from: Path | None = None) -> Path:
    """A model's folder in bfloat16.

    Args:
        grown_from: A folder of the same widths with fewer layers, whose weights are used again.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    from mmrl.engine.aids.tiny_model import SPECIAL_TOKENS, write_processor, write_tokenizer
    from mmrl.engine.network.weights import shards

    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder, vision=vision)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    stem, head = ("Qwen2_5_VL", "ForConditionalGeneration") if vision else ("Qwen2", "ForCausalLM")
    config = getattr(transformers, f"{stem}Config")(**_values(widths, ids, vision))
    if vision:
        write_processor(folder, "qwen2_5_vl", max_pixels=2_000_000)
    with torch.device("meta"):
        model = getattr(transformers, stem + head)(config)
    config.architectures = [stem + head]  # vLLM takes a folder without for one that samples nothing
    model.to(torch.bfloat16).config.save_pretrained(folder)
    places: dict[str, str] = {}
    if grown_from is not None:
        places |= json.loads((grown_from / "model.safetensors.index.json").read_text())["weight_map"]
        for file in set(places.values()):
            (folder / file).symlink_to(grown_from / file)
    shapes = {name: weight.shape for name, weight in model.named_parameters() if name not in places}
    sizes = {name: 2 * shape.numel() for name, shape in shapes.items()}
    for number, names in enumerate(shards(sizes, SHARD_BYTES)):
        file = f"model-{widths.layers:02d}-{number:02d}.safetensors"
        save_file(
            {name: _drawn(name, shapes[name], bench.device).cpu() for name in names}, folder / file, {"format": "pt"}
        )
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    generation = {"eos_token_id": [ids["<|im_end|>"]], "pad_token_id": ids["<|endoftext|>"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _values(widths: Widths, ids: Mapping[str, int], vision: bool) -> dict[str, Any]:
    from mmrl.engine.aids.tiny_model import VISION_TOKENS

    half = widths.hidden // widths.heads // 2
    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = {
        "hidden_size": widths.hidden,
        "intermediate_size": widths.mlp,
        "num_hidden_layers": widths.layers,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": widths.kv_heads,
        "vocab_size": widths.vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    if not vision:
        return text
    text["rope_parameters"] = rope | {"mrope_section": [half // 4, half * 3 // 8, half * 3 // 8]}
    layers = widths.tower_layers
    tower = {
        "depth": layers,
        "hidden_size": widths.tower_width,
        "intermediate_size": widths.tower_mlp,
        "num_heads": widths.tower_heads,
        "out_hidden_size": widths.hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [layers * part // 4 - 1 for part in range(1, 5)] if layers >= 4 else [layers - 1],
    }
    tokens = {f"{name}_id": ids[token] for name, token in VISION_TOKENS.items()}
    return {**tokens, "text_config": text, "vision_config": tower, "tie_word_embeddings": True}


def _drawn(name: str, shape: Sequence[int], where: str) -> Any:
    """Weights as models begin with: norms of 1, biases of 0, the rest normal with a deviation of 0.02."""
    import torch

    if name.endswith("bias"):
        return torch.zeros(*shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return torch.ones(*shape, dtype=torch.bfloat16)
    return torch.empty(*shape, dtype=torch.bfloat16, device=where).normal_(0, 0.02)


@dataclass(frozen=True, slots=True)
class Load:
    """What one update trains on.

    Attributes:
        image: Sides in pixels; None for text alone.
    """

    prompts: int
    prompt_tokens: int
    group: int
    completion: int
    budget: int
    image: tuple[int, int] | None


def write_prompts(folder: Path, load: Load) -> Path:
    """A table of prompts of that length or a little less, each with an image of its own if the model reads any."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(load.prompts):
        merged, line = 0, dict[str, Any](answer="1")
        if load.image is not None:
            width, height = load.image
            merged = width * height // 28**2
            noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{number}.png", compress_level=1)
            line["images"] = [f"{number}.png"]
        digits = np.random.default_rng(number).integers(0, 10, max(load.prompt_tokens - merged - 24, 1))
        question = "".join(map(str, digits))  # each is a token
        line["question"] = ("<image>" if load.image else "") + question
        lines.append(json.dumps(line))
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


class Training:
    """A model and prompts, and learners of them with any settings, one after the other.

    Args:
        model: The model's folder.
        data: The table of prompts.
    """

    def __init__(self, bench: Bench, model: Path, data: Path, load: Load) -> None:
        self._bench, self._model, self._data, self.load = bench, model, data, load

    def of(self, model: Path) -> Training:
        """The same with another model."""
        return Training(self._bench, model, self._data, self.load)

    def config(self, **sections: Any) -> Any:
        """As from a file; sections as in YAML."""
        from mmrl.config.load import from_mapping

        load = self.load
        base: dict[str, Any] = {
            "model": {"path": str(self._model), "dtype": "bfloat16"},
            "data": {
                "train": {"name": "table", "path": str(self._data)},
                "max_prompt_tokens": load.prompt_tokens,
                "max_pixels": 2_000_000,
            },
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "hf", "group_size": load.group, "max_new_tokens": load.completion},
            "learner": {"lr": 1e-6, "tokens_per_microbatch": load.budget},
            "trainer": {"prompts_per_step": load.prompts, "steps": 1000},
        }
        return from_mapping(base | {key: base.get(key, {}) | value for key, value in sections.items()})

    def forecast(self, config: Any, part: str = "learner") -> dict[str, Any]:
        """What ``mmrl plan`` says of a part; empty if it says nothing."""
        from mmrl.commands.plan.forecast import Assumptions, forecast

        memory = None if self._bench.kind == "cpu" else 10**12
        assumed = Assumptions(memory_bytes=memory, completion_tokens=self.load.completion)
        found = forecast(config, self._bench.folder / "plan-media", assumed).data.get(part, {})
        assert isinstance(found, dict)
        return found

    def start(self, config: Any, checkpoint: Path | None = None) -> Run:
        """An engine with a learner alone."""
        from mmrl.cluster.local import start_engine
        from mmrl.runs.setup import RunSetup

        setup = RunSetup(config, self._bench.folder / "media")
        spec = setup.engine_spec(setup.algorithm, checkpoint)
        return Run(start_engine(replace(spec, with_sampler=False)), setup, rows_of(setup, self.load))


@dataclass(frozen=True, slots=True)
class Run:
    """An engine and what it trains on."""

    engine: Any
    plan: Any
    rows: list[Any]

    @property
    def samples(self) -> list[Any]:
        return [row.sample for row in self.rows]

    def update(self) -> Any:
        """One optimizer step."""
        with self.engine.learning() as learner:
            return learner.network("policy").update(self.rows)

    def release(self) -> None:
        """Make room on the device for the next one."""
        with self.engine.learning() as learner:
            learner.release()

    def logprobs(self) -> list[Any]:
        with self.engine.learning() as learner:
            return list(learner.network("policy").score(self.samples))


def rows_of(plan: Any, load: Load) -> list[Any]:
    """Random completions, of which every second is to become likelier."""
    from mmrl.ops.objective import training_rows
    from mmrl.types import Sample, Segment

    rng, vocabulary = np.random.default_rng(0), plan.folder.vocabulary
    allowed = np.setdiff1d(np.arange(vocabulary.size), vocabulary.banned)
    prompts = plan.training.each(plan.encoder.encode, load.prompts)
    drawn = [
        (prompt, rng.choice(allowed, load.completion).astype(np.int32)) for prompt in prompts for _ in range(load.group)
    ]
    samples = [Sample(prompt, (Segment(ids, True, np.zeros(len(ids), np.float32)),)) for prompt, ids in drawn]
    signs = [np.full(load.completion, 1.0 if number % 2 else -1.0) for number in range(len(samples))]
    groups, masks = np.arange(len(samples)) // load.group, [sample.mask for sample in samples]
    return list(
        training_rows(
            samples, masks, {"advantages": signs}, groups, plan.algorithm.aggregation, range(len(samples))
        ).values()
    )


def shallow(widths: Widths, layers: int) -> Widths:
    return replace(widths, layers=layers)
