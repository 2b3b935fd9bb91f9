"""``mmrl train`` with the ``hf`` sampler: a supervised warm-up, then twenty steps of GRPO, on digits or on sums."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bench import Bench, lacks_image_features
from tests.gpu.row import Row

STEPS = 20
FALL = 0.1
"""Accuracy may be this much lower after so few steps, and no more."""


def run(bench: Bench) -> None:
    data, family = bench.folder / "data", "qwen2_5_vl"
    if reason := lacks_image_features():
        bench.skip("digits", f"{reason}; sums take the place")
        family = "qwen2"
        _write_sums(data, bench.pick(60, 4))
    else:
        from mmrl_datasets.digits import write_digits

        write_digits(data, train=1000, test=bench.pick(60, 4), warmup=600)
    what = "sums" if reason else "digits"
    from mmrl.engine.tiny_model import write_model

    model = write_model(bench.folder / "model", family)
    warm = bench.folder / "sft"
    bench.attempt(f"{what}: supervised warm-up", partial(_warm_up, bench, model, data, warm))
    if (warm / "checkpoints").is_dir():
        bench.attempt(f"{what}: GRPO", partial(_reinforce, bench, data, warm, bench.folder / "grpo"))


def _write_sums(folder: Path, tests: int) -> None:
    """Sums of two digits: all of them to learn from, some of them asked."""
    folder.mkdir()
    rows = [
        {"question": f"what is {a}+{b}?", "answer": str(a + b), "solution": f"\\boxed{{{a + b}}}"}
        for a in range(10)
        for b in range(10)
    ]
    drawn = np.random.default_rng(0).permutation(len(rows))
    splits = {"train": rows, "warmup": rows * 6, "test": [rows[index] for index in drawn[:tests]]}
    for split, some in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def _train(model: Path, data: Path, run_dir: Path, split: str, **sections: Any) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    base: dict[str, Any] = {
        "model": {"path": str(model), "gradient_checkpointing": False},
        "data": {
            "train": {"name": "table", "path": str(data), "split": split},
            "max_prompt_tokens": 64,
            "max_pixels": 50176,
        },
        "rewards": [{"name": "exact"}],
        "sampler": {"name": "hf", "max_new_tokens": 12},
        "learner": {"zero_stage": 0, "tokens_per_microbatch": 16384},
        "trainer": {"save_every": 10**6, "run_dir": str(run_dir)},
    }
    config = base | {key: base.get(key, {}) | value for key, value in sections.items()}
    file = run_dir.with_suffix(".yaml")
    file.write_text(json.dumps(config))
    # In a process of its own: DeepSpeed 0.19 cannot join a second group of ranks.
    done = subprocess.run([sys.executable, "-m", "mmrl", "train", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mmrl train ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _warm_up(bench: Bench, model: Path, data: Path, run_dir: Path, name: str) -> Row:
    steps = bench.pick(85, 2)
    sections = {"learner": {"lr": 2e-3}, "trainer": {"steps": steps, "prompts_per_step": bench.pick(64, 4)}}
    found = _train(model, data, run_dir, "warmup", algorithm={"name": "sft"}, **sections)
    losses = [line["loss/policy"] for line in found if "loss/policy" in line]
    good = len(losses) == steps and losses[-1] < losses[0]
    return bench.row(name, f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {steps} steps", good=good)


def _reinforce(bench: Bench, data: Path, warm: Path, run_dir: Path, name: str) -> Row:
    from mmrl.ops.parity import LIMITS

    model, steps = next((warm / "checkpoints").glob("step-*/model")), bench.pick(STEPS, 2)
    found = _train(
        model,
        data,
        run_dir,
        "train",
        algorithm={"name": "grpo"},
        learner={"lr": 5e-4},
        sampler={"group_size": bench.pick(8, 4)},
        trainer={"steps": steps, "prompts_per_step": bench.pick(16, 2), "eval_every": steps},
        data={"eval": {"name": "table", "path": str(data), "split": "test"}},
    )
    accuracy = [line["eval/accuracy"] for line in found if "eval/accuracy" in line]
    gaps = [line["mismatch/logprob_abs_mean"] for line in found if "mismatch/logprob_abs_mean" in line]
    seconds = [line["perf/step_s"] for line in found if "perf/step_s" in line]
    limit = LIMITS["bfloat16" if bench.kind == "cuda" else "float32"].mean_stop
    value = (
        f"accuracy {accuracy[0]:.1%} to {accuracy[-1]:.1%} in {len(gaps)} steps of {np.median(seconds):.2g} s, sampler "
        f"and learner {max(gaps):.1e} nats apart on average at most"
    )
    good = len(gaps) == steps and max(gaps) <= limit and accuracy[-1] >= accuracy[0] - FALL
    return bench.row(name, value, good=good, why=f"limits: {limit:g} nats, {FALL:.0%} less accurate")
