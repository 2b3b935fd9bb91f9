"""The example of two teachers in a short form: each teaches rows of its own source."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmrl.engine.aids.tiny_model import write_model
from mmrl.rollout.records import read_lines
from mmrl.runs.reader import load_run
from mmrl_datasets.digits import write_digits

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"


def table(path: Path, split: str, label: str, more: str = "") -> str:
    return f"{{name: table, path: {path}, split: {split}, label: {label}{more}}}"


def test_each_teacher_is_asked_for_digits_of_its_kind(
    tmp_path: Path, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """One of them is the policy itself, so at the first step it finds nothing to teach."""
    models = [write_model(tmp_path / f"model-{seed}", seed=seed, gain=2.0) for seed in (0, 1)]
    folders = {name: tmp_path / name for name in ("upright", "turned")}
    for turns, folder in enumerate(folders.values()):
        write_digits(folder, train=8, test=4, quarter_turns=turns)
    sets = ", ".join(f"{name}: {table(folder, 'test', 'held_out')}" for name, folder in folders.items())
    teachers = ", ".join(f"{{path: {model}, sources: [{name}]}}" for model, name in zip(models, folders, strict=True))
    words = [
        f"model.path={models[0]}",
        f"reference=[{teachers}]",
        f"data.train={table(folders['upright'], 'train', 'upright', ', weight: 1')}",
        f"data.mix=[{table(folders['turned'], 'train', 'turned', ', weight: 1')}]",
        f"data.eval={{{sets}}}",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    sizes = ["trainer.steps=1", "trainer.prompts_per_step=8", "trainer.eval_every=1", "sampler.group_size=2"]
    done = warm_mmrl("train", EXAMPLES / "digits_opd.yaml", *words, *sizes)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    assert {"eval/upright/accuracy", "eval/turned/accuracy", "distill/kl"} <= {*run.metrics}
    assert "reward/mean" not in run.metrics, "no training row has a reward"
    gaps: dict[str, list[float]] = {name: [] for name in folders}
    for record in read_lines(run.path / "rollouts" / "step-000001.parquet"):
        apart = np.abs(np.subtract(record["learner_logprobs"], record["reference_logprobs"])).mean()
        gaps[record["source"]].append(float(apart))
    assert [len(each) for each in gaps.values()] == [8, 8]
    assert max(gaps["upright"]) < 1e-5 and min(gaps["turned"]) > 1e-3
