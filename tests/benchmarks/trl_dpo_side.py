"""TRL's side of the comparison on pairs of answers, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stopwatch import Report, Stopwatch
from trl_side import peer, score_completions_only, time_parts, timed

NEVER = -1e9
"""The score of an id that is left out of the softmax."""


def dataset(path: Path, processor: Any) -> Any:
    """The rows of a data file, rendered: TRL's own rendering of an answer goes on to the template's next line.

    Images are files that ``datasets`` decodes when a row is read.
    """
    from datasets import Dataset, Image

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    end = getattr(processor, "tokenizer", processor).eos_token
    columns: dict[str, list[Any]] = {"prompt": [_rendered(row["question"], processor) for row in rows]}
    columns |= {name: [row[name] + end for row in rows] for name in ("chosen", "rejected")}
    if "images" not in rows[0]:
        return Dataset.from_dict(columns)
    columns["image"] = [str(path.parent / row["images"][0]) for row in rows]
    return Dataset.from_dict(columns).cast_column("image", Image())


def _rendered(question: str, processor: Any) -> str:
    content: Any = question
    if question.startswith("<image>"):
        content = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>")}]
    messages = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """DPOConfig's values: all pairs of a step at once, no recomputation, float32, nothing is cut."""
    return {
        "output_dir": job["output"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job["prompts"],
        "gradient_accumulation_steps": 1,
        "max_length": None,
        "beta": 0.1,
        "loss_type": ["sigmoid"],
        "precompute_ref_log_probs": False,
        "lr_scheduler_type": "constant",
        "learning_rate": job["lr"],
        "optim": "adamw_torch",
        "dataloader_num_workers": 0,
        "max_steps": job["steps"],
        "seed": 0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 10**6,
        "disable_tqdm": True,
    }


def model(job: dict[str, Any], *, banned: list[int]) -> Any:
    """The model; of ids that are ``banned``, its head has a bias that leaves them out."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(job["model"])
    vision = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    found = auto.from_pretrained(job["model"], attn_implementation="sdpa", dtype=torch.float32)
    if banned:
        bias = torch.zeros(found.get_output_embeddings().out_features)
        bias[banned] = NEVER
        found.get_output_embeddings().bias = torch.nn.Parameter(bias, requires_grad=False)
    for part in ("visual",) if job["freeze"] else ():
        getattr(found.model, part).requires_grad_(False)
    return found


def gate_class(job: dict[str, Any]) -> Any:
    """DPOTrainer, which in its last step writes down its weights, its batch and what it makes of it, and ends there."""
    import numpy as np
    import torch

    class Recorded(peer().DPOTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            last = self.state.global_step + 1 == job["steps"]
            if last:
                self._write_weights(model)
                names = ("input_ids", "attention_mask", "completion_mask")
                arrays = {name: inputs[name].numpy().astype(np.int64) for name in names}
                arrays |= {"logprobs": self._of(model, inputs), "reference": self._of(self.ref_model, inputs)}
            loss = super().training_step(model, inputs, *args, **kwargs)
            if last:
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                np.savez(job["batch"], loss=np.asarray(loss), grad_norm=np.asarray(norm), **arrays)
            return loss

        def _write_weights(self, model: Any) -> None:
            from safetensors.torch import save_file

            names = (name for name in model.state_dict() if name != "lm_head.bias")
            save_file({name: model.state_dict()[name].contiguous() for name in names}, job["moved"])

        def _of(self, model: Any, inputs: Any) -> Any:
            """Log-probs of whole answers."""
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            given = {name: value for name, value in inputs.items() if name != "completion_mask"}
            with torch.no_grad():
                found = model(**given, labels=labels, fused_lm_head=True, use_cache=False)
            return found.log_probs.double().sum(1).numpy()

    return Recorded


def main() -> None:
    job = json.loads(sys.argv[1])
    watch = Stopwatch()
    report = Report(job["report"], watch)
    import transformers

    if job["completions_only"]:
        score_completions_only()
    processor = transformers.AutoProcessor.from_pretrained(job["model"])
    arguments = {
        "model": model(job, banned=job["banned"]),
        "ref_model": model(job, banned=job["banned"]),
        "args": peer().DPOConfig(**settings(job)),
        "train_dataset": dataset(Path(job["data"]), processor),
        "processing_class": processor,
    }
    if job["kind"] == "gate":
        gate_class(job)(**arguments).train()
        return
    trainer = timed(peer().DPOTrainer, watch, report, job["steps"])(**arguments)
    time_parts(watch, processor)
    trainer.train()


if __name__ == "__main__":
    main()
