"""Check a finished run with nothing but transformers: `python examples/verify_run.py RUN [--prompts 300]`.

1. The held-out accuracy of the final model folder, by greedy ``generate``, against the run's own last evaluation.
2. The log-probs of the first step's rollouts, from the model that the run started with, against what was recorded.

Nothing of mmrl is imported. Made for the digits' answers, ``\\boxed{7}``.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]


def load(folder: str) -> tuple[Any, Any, list[int]]:
    """The model, its processor, and the ids that are never sampled."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    known = set(processor.tokenizer.get_vocab().values())
    banned = set(range(model.config.text_config.vocab_size)) - known
    return model, processor, sorted(banned | set(processor.tokenizer.convert_tokens_to_ids(VISION_TOKENS)))


@torch.no_grad()
def accuracy(folder: str, config: dict[str, Any], num_prompts: int) -> float:
    """Share of the held-out rows whose greedy completion is the boxed answer."""
    model, processor, banned = load(folder)
    processor.tokenizer.padding_side = "left"
    data = config["data"]["eval"]
    rows = pq.read_table(Path(data["path"]) / f"{data['split']}.parquet").to_pylist()[:num_prompts]
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=config["sampler"]["max_new_tokens"],
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
        suppress_tokens=banned,
    )
    right = 0
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        parts = [{"type": "image"}, {"type": "text", "text": ""}]
        texts = []
        for row in part:
            parts[1] = {"type": "text", "text": row["problem"].replace("<image>", "")}
            texts.append(
                processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
            )
        images = [Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB") for row in part]
        inputs = processor(text=texts, images=images, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
        answers = processor.batch_decode(ids, skip_special_tokens=True)
        right += sum(a.strip() == f"\\boxed{{{row['answer']}}}" for a, row in zip(answers, part, strict=True))
    return right / len(rows)


@torch.no_grad()
def largest_gap(run: Path, config: dict[str, Any], num_rollouts: int) -> dict[str, float]:
    """Largest differences between recorded log-probs and recomputed ones, in nats, over the first rollouts."""
    model, processor, banned = load(config["model"]["path"])
    groups = pq.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    sampled = [(group, each) for group in groups for each in group["rollouts"] if not each["greedy"]]  # greedy: at 0
    gaps = {"sampler": 0.0, "learner": 0.0}
    for group, record in sampled[:num_rollouts]:
        prompt, completion = group["prompt_token_ids"], record["token_ids"]
        images = [Image.open(run / "media" / f"{image['hash']}.png") for image in group["images"]]
        vision = processor.image_processor(images=images, return_tensors="pt")
        ids = torch.tensor([prompt + completion])
        types = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **vision).logits[0]
        logits = logits[len(prompt) - 1 : -1] / config["sampler"]["temperature"]
        logits[:, banned] = -torch.inf
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        for name in gaps:
            recorded = torch.tensor(record[f"{name}_logprobs"])
            if len(recorded):
                gaps[name] = max(gaps[name], float((logprobs - recorded).abs().max()))
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=10**6, help="held-out prompts to answer (all)")
    parser.add_argument("--rollouts", type=int, default=128, help="rollouts to recompute")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    run = arguments.run
    config = yaml.safe_load((run / "config.yaml").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line][-1]
    final = max((run / "checkpoints").glob("step-*")) / "model"
    plain = accuracy(str(final), config, arguments.prompts)
    print(f"held-out accuracy of {final}: {plain:.1%} with transformers, {own:.1%} in the run")
    for name, gap in largest_gap(run, config, arguments.rollouts).items():
        print(f"largest difference to the {name}'s recorded log-probs: {gap:.1e} nats")


if __name__ == "__main__":
    main()
