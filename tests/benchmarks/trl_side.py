"""TRL's side of the comparison, in a process of its own: the only place that needs TRL."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

# This folder holds a trl.py of its own: search it last.
sys.path.append(sys.path.pop(0))

from stopwatch import Report, Stopwatch, peak_memory
from workloads import score


def peer(module: str = "trl") -> Any:
    """TRL, by its name: a checker of types would find this folder's."""
    return importlib.import_module(module)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """The reward; a chat's completion is a list of one message."""
    return [score(completion[0]["content"]) for completion in completions]


def dataset(path: Path) -> Any:
    """The rows of a data file, images as files that ``datasets`` decodes when a row is read."""
    from datasets import Dataset, Image

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": row["question"].removeprefix("<image>")}] for row in rows]
    }
    if "images" not in rows[0]:
        return Dataset.from_dict(columns)
    columns["image"] = [str(path.parent / row["images"][0]) for row in rows]
    return Dataset.from_dict(columns).cast_column("image", Image())


def settings(job: dict[str, Any], banned: list[int]) -> dict[str, Any]:
    """GRPOConfig's values: all of a step at once, no reference policy, no recomputation, float32."""
    fixed = {} if job["natural"] else {"min_new_tokens": job["completion"]}
    return {
        "output_dir": job["output"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job["prompts"] * job["group"],
        "gradient_accumulation_steps": 1,
        "num_generations": job["group"],
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "mask_truncated_completions": False,
        "lr_scheduler_type": "constant",
        "learning_rate": job["lr"],
        "optim": "adamw_torch",
        "dataloader_num_workers": 0,
        "use_vllm": False,
        "max_completion_length": job["completion"],
        "generation_kwargs": {**fixed, "suppress_tokens": banned},
        "max_steps": job["steps"],
        "seed": 0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 10**6,
        "disable_tqdm": True,
        "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
    }


def timed(base: Any, watch: Stopwatch, report: Report, last_step: int) -> Any:
    """A class of TRL's trainers with clocks around its parts, which tells of each step.

    Args:
        last_step: The one whose memory is measured.
    """
    from transformers import TrainerCallback

    class Turns(TrainerCallback):  # type: ignore[misc]
        def __init__(self, trainer: Timed) -> None:
            self.trainer = trainer

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer = self.trainer
            if trainer.memory is not None:
                trainer.measured.__exit__(None, None, None)
            report(tokens=trainer.completion_tokens, phases=watch.take(), memory=trainer.memory)

    class Timed(base):  # type: ignore[misc]
        memory: dict[str, int] | None = None
        completion_tokens = 0

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs, callbacks=[Turns(self)])

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            with watch.phase("data"):
                return super().get_batch_samples(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.completion_tokens = int(inputs["completion_mask"].sum())
            with watch.phase("forward"):
                if self.state.global_step + 1 == last_step:
                    self.memory = {}
                    self.measured = peak_memory(self.memory)
                    self.measured.__enter__()
                return super().compute_loss(model, inputs, *args, **kwargs)

    return Timed


def time_parts(watch: Stopwatch, processor: Any) -> None:
    """Clocks around parts of a step that are not the trainer's own."""
    import accelerate.optimizer

    import datasets

    watch.time(datasets.Image, "decode_example", "images")
    if hasattr(processor, "image_processor"):
        watch.time(type(processor.image_processor), "preprocess", "images")
    watch.time(accelerate.Accelerator, "backward", "backward")
    watch.time(accelerate.Accelerator, "clip_grad_norm_", "optimizer")
    watch.time(accelerate.optimizer.AcceleratedOptimizer, "step", "optimizer")


def trainer_class(watch: Stopwatch, report: Report, job: dict[str, Any]) -> Any:
    """GRPOTrainer with clocks around its parts."""

    class Timed(timed(peer().GRPOTrainer, watch, report, job["steps"])):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with watch.phase("prepare"):
                return super()._generate_and_score_completions(inputs)

    return Timed


def gate_class(job: dict[str, Any]) -> Any:
    """TRL's trainer, which writes its first batch down, with loss and gradient, and stops."""
    import numpy as np
    import torch

    class Recorded(peer().GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            """With old log-probs that differ from the current ones: else the loss would be the mean advantage."""
            output = super()._generate_and_score_completions(inputs)
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
            kinds = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
            with torch.no_grad():
                logprobs, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    ids,
                    mask,
                    output["completion_ids"].shape[1],
                    **{kind: output[kind] for kind in kinds if kind in output},
                )
            noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
            output["old_per_token_logps"] = logprobs + 0.1 * noise
            self.batch = {key: output[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask",
                                                       "advantages", "old_per_token_logps")}  # fmt: skip
            self.batch["logprobs"] = logprobs
            return output

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            arrays: dict[str, Any] = {key: value.float().numpy() for key, value in self.batch.items()}
            arrays |= {"loss": np.asarray(loss), "grad_norm": np.asarray(norm)}
            np.savez(job["batch"], **arrays)
            return loss

    return Recorded


def main() -> None:
    job = json.loads(sys.argv[1])
    watch = Stopwatch()
    report = Report(job["report"], watch)
    import transformers

    from mmrl.engine.network.family import VISION_TOKENS

    if job["completions_only"]:
        score_completions_only()
    processor = transformers.AutoProcessor.from_pretrained(job["model"])
    tokenizer = getattr(processor, "tokenizer", processor)
    known = tokenizer.get_vocab()
    banned = [known[token] for token in VISION_TOKENS if token in known]
    arguments = {
        "model": job["model"],
        "reward_funcs": vowels,
        "args": peer().GRPOConfig(**settings(job, banned)),
        "train_dataset": dataset(Path(job["data"])),
        "processing_class": processor,
    }
    if job["kind"] == "gate":
        gate_class(job)(**arguments).train()
        return
    trainer = trainer_class(watch, report, job)(**arguments)
    time_parts(watch, processor)
    watch.time(type(trainer.model), "generate", "generate")
    trainer.train()


def score_completions_only() -> None:
    """Let TRL score completions alone, as on a GPU; elsewhere it scores every position."""
    peer("trl.trainer.utils")._use_triton = lambda device: True


if __name__ == "__main__":
    main()
