"""The reasoning example's configs: they load, are sound, and train on what the generator writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.aids.tiny_model import write_model
from mmrl_datasets.geometry import write_geometry

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("geometry_sft", "geometry_grpo")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What makes a config small: the paths of a random model and few rows, and two short steps."""
    folder = tmp_path_factory.mktemp("geometry")
    write_model(folder / "model", size="small")
    write_geometry(
        folder / "data", train=16, test=4, warmup=16, fresh=4, kinds=("right_corner",), level=1, image_size=84
    )
    small = [
        f"model.path={folder / 'model'}",
        f"data.train.path={folder / 'data'}",
        f"data.eval.path={folder / 'data'}",
    ]
    small += ["trainer.steps=2", "trainer.prompts_per_step=8", "trainer.eval_every=2"]
    small += ["learner.warmup_steps=1", "sampler.group_size=2"]
    small += ["sampler.engine.kv_cache_memory_bytes=67108864", "sampler.engine.max_num_seqs=32"]
    return lambda name: [*small, f"trainer.run_dir={folder / name}"]


@pytest.fixture(scope="module")
def runs(
    overrides: Callable[[str], list[str]], warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> dict[str, list[dict[str, Any]]]:
    """The metrics of both runs."""

    def train(name: str) -> list[dict[str, Any]]:
        process = warm_mmrl("train", EXAMPLES / f"{name}.yaml", *overrides(name))
        assert process.returncode == 0, process.stderr
        (run_dir,) = [word.partition("=")[2] for word in overrides(name) if "run_dir" in word]
        return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]

    return {name: train(name) for name in NAMES}


def test_the_warm_up_learns_from_worked_solutions_of_more_than_60_tokens(runs: Any) -> None:
    _, first, second = runs["geometry_sft"]
    assert first["length/completion_mean"] > 60
    assert second["loss/policy"] < first["loss/policy"] - 0.1


def test_reinforcement_learning_reports_what_the_example_is_about(runs: Any) -> None:
    start, *steps = runs["geometry_grpo"]
    assert 0 <= start["eval/accuracy"] <= 1 and 0 <= start["eval/format_mean"] <= 1
    for step in steps:
        assert step["mismatch/logprob_abs_max"] < 1e-4
        assert 0 < step["length/truncated_fraction"] < 1  # a random policy stops by chance
        assert step["reward/format_mean"] <= 0.5 and step["reward/math_mean"] <= 0.5
