"""Check a finished run with nothing but transformers: `python examples/verify_run.py RUN [--model FOLDER]`.

1. The held-out accuracy of the final model folder, by greedy ``generate``, against the run's own last evaluation.
   ``--model`` names another folder: what ``mmrl export`` has made of adapters, which are no model alone.
2. The log-probs of the first step's rollouts, from the model that the run started with, against what was recorded.

Nothing of mmrl is imported. Made for rows of this repository's generators whose answers are numbers.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]


@dataclass
class Policy:
    """A model folder, as transformers opens it.

    Attributes:
        processor: Of text and images; None for a text model.
        banned: Ids that are never sampled.
    """

    model: Any
    tokenizer: Any
    processor: Any
    banned: list[int]

    @classmethod
    def load(cls, folder: str) -> Self:
        config = AutoConfig.from_pretrained(folder)
        vision = hasattr(config, "vision_config")
        auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        processor = AutoProcessor.from_pretrained(folder) if vision else None
        tokenizer = processor.tokenizer if processor else AutoTokenizer.from_pretrained(folder)
        banned = set(range(config.get_text_config().vocab_size)) - set(tokenizer.get_vocab().values())
        banned |= set(tokenizer.convert_tokens_to_ids(VISION_TOKENS)) if vision else set()
        return cls(model, tokenizer, processor, sorted(banned))

    def inputs(self, rows: list[dict[str, Any]]) -> Any:
        """The rows' prompts, padded on the left."""
        texts = [row["problem"].replace("<image>", "") for row in rows]
        contents = [[{"type": "image"}, {"type": "text", "text": text}] if self.processor else text for text in texts]
        turns = [[{"role": "user", "content": content}] for content in contents]
        read: Any = self.processor or self.tokenizer
        prompts = [read.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
        options = {"padding": True, "return_tensors": "pt", "add_special_tokens": False}
        if self.processor:
            options["images"] = [Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB") for row in rows]
        return read(text=prompts, **options)


def answer(text: str) -> str:
    """The content of the last box, else the last number."""
    found: list[str] = re.findall(r"\\boxed{([^{}]*)}", text) or re.findall(r"-?\d+", text) or [""]
    return found[-1]


@torch.no_grad()
def accuracy(folder: str, config: dict[str, Any], num_prompts: int) -> float:
    """Share of the held-out rows whose greedy completion has the right answer."""
    policy = Policy.load(folder)
    policy.tokenizer.padding_side = "left"
    data = config["data"]["eval"]
    rows = pq.read_table(Path(data["path"]) / f"{data['split']}.parquet").to_pylist()[:num_prompts]
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=config["sampler"]["max_new_tokens"],
        eos_token_id=policy.model.generation_config.eos_token_id,
        pad_token_id=policy.tokenizer.pad_token_id,
        suppress_tokens=policy.banned,
    )
    right = 0
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        inputs = policy.inputs(part)
        ids = policy.model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
        texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        right += sum(answer(text) == row["answer"] for text, row in zip(texts, part, strict=True))
    return right / len(rows)


@torch.no_grad()
def gaps(run: Path, config: dict[str, Any], num_rollouts: int) -> dict[str, torch.Tensor]:
    """Differences between recorded log-probs and recomputed ones, in nats, token by token, over the first rollouts."""
    policy = Policy.load(config["model"]["path"])
    groups = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    sampled = [(group, each) for group in groups for each in group["rollouts"] if not each["greedy"]]  # greedy: at 0
    found: dict[str, list[torch.Tensor]] = {"sampler": [], "learner": []}
    for group, record in sampled[:num_rollouts]:
        prompt, completion = group["prompt_token_ids"], record["token_ids"]
        ids = torch.tensor([prompt + completion])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if policy.processor:
            images = [Image.open(run / "media" / f"{image['hash']}.png") for image in group["images"]]
            inputs |= policy.processor.image_processor(images=images, return_tensors="pt")
            inputs["mm_token_type_ids"] = (ids == policy.model.config.image_token_id).int()
        logits = policy.model(**inputs).logits[0, len(prompt) - 1 : -1] / config["sampler"]["temperature"]
        logits[:, policy.banned] = -torch.inf
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        for name, parts in found.items():
            if recorded := record[f"{name}_logprobs"]:
                parts.append((logprobs - torch.tensor(recorded)).abs())
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, help="folder of the final model (that of the newest checkpoint)")
    parser.add_argument("--prompts", type=int, default=10**6, help="held-out prompts to answer (all)")
    parser.add_argument("--rollouts", type=int, default=128, help="rollouts to recompute")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    run = arguments.run
    config = yaml.safe_load((run / "config.yaml").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line][-1]
    final = arguments.model or max((run / "checkpoints").glob("step-*")) / "model"
    plain = accuracy(str(final), config, arguments.prompts)
    print(f"held-out accuracy of {final}: {plain:.1%} with transformers, {own:.1%} in the run")
    for name, gap in gaps(run, config, arguments.rollouts).items():
        print(
            f"difference to the {name}'s recorded log-probs: at most {gap.max():.1e} nats, {gap.mean():.1e} in the mean"
        )


if __name__ == "__main__":
    main()
