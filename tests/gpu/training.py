"""``mmrl train`` with the ``hf`` sampler: a supervised warm-up, then twenty steps of GRPO, on digits or on sums."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bench import Bench, lacks_image_features
from tests.gpu.row import Row
from tests.gpu.runs import Run, write_sums

STEPS = 20
FALL = 0.1
"""Accuracy may be this much lower after so few steps, and no more."""


def run(bench: Bench) -> None:
    data, family = bench.folder / "data", "qwen2_5_vl"
    if reason := lacks_image_features():
        bench.skip("digits", f"{reason}; sums take the place")
        family = "qwen2"
        write_sums(data, bench.pick(60, 4))
    else:
        from mmrl_datasets.digits import write_digits

        write_digits(data, train=1000, test=bench.pick(60, 4), warmup=600)
    what = "sums" if reason else "digits"
    from mmrl.engine.aids.tiny_model import write_model

    model = write_model(bench.folder / "model", family)
    warm = bench.folder / "sft"
    bench.attempt(f"{what}: supervised warm-up", partial(_warm_up, bench, model, data, warm))
    if (warm / "checkpoints").is_dir():
        bench.attempt(f"{what}: GRPO", partial(_reinforce, bench, data, warm, bench.folder / "grpo"))


def _warm_up(bench: Bench, model: Path, data: Path, run_dir: Path, name: str) -> Row:
    steps = bench.pick(85, 2)
    sections: dict[str, dict[str, Any]] = {
        "learner": {"lr": 2e-3},
        "trainer": {"steps": steps, "prompts_per_step": bench.pick(64, 4)},
    }
    found = Run.written(run_dir, model, data, "warmup", {"algorithm": {"name": "sft"}, **sections}).finished()
    losses = [line["loss/policy"] for line in found if "loss/policy" in line]
    good = len(losses) == steps and losses[-1] < losses[0]
    return bench.row(name, f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {steps} steps", good=good)


def _reinforce(bench: Bench, data: Path, warm: Path, run_dir: Path, name: str) -> Row:
    from mmrl.ops.parity import LIMITS

    model, steps = next((warm / "checkpoints").glob("step-*/model")), bench.pick(STEPS, 2)
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "grpo"},
        "learner": {"lr": 5e-4},
        "sampler": {"group_size": bench.pick(8, 4)},
        "trainer": {"steps": steps, "prompts_per_step": bench.pick(16, 2), "eval_every": steps},
        "data": {"eval": {"name": "table", "path": str(data), "split": "test"}},
    }
    found = Run.written(run_dir, model, data, "train", sections).finished()
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
