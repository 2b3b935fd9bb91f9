"""A whole run of preferences from the command line: pairs of answers to pictures, with held-out pairs and a kill."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.rollout.records import read_lines, recorded_evaluations
from mmrl_datasets.digits import held_out_digits, read_digits
from mmrl_datasets.layout import png
from tests.faults.comparison import compare, metrics
from tests.faults.harness import Blow
from tests.faults.runs import Runs, events, outcome, steps

pytestmark = pytest.mark.full

KILL = Blow(at=("point", "checkpoint.renamed", 2))
"""Dealt when the checkpoint after the start's is there, before its step is logged."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Runs:
    """Pictures of digits, each with its digit (chosen) and another (rejected)."""
    folder = tmp_path_factory.mktemp("pairs")
    pixels, values = read_digits(56)
    held_out, others = held_out_digits(0)
    draw = np.random.default_rng(0)
    for split, indices in (("train", others), ("test", held_out[:150])):
        rows = []
        for index in indices:
            (folder / f"{index}.png").write_bytes(png(Image.fromarray(pixels[index]).convert("RGB")))
            right, other = int(values[index]), int((values[index] + draw.integers(1, 10)) % 10)
            row = {"image": f"{index}.png", "question": "Which digit?", "chosen": str(right), "rejected": str(other)}
            rows.append(row | {"kind": "odd" if right % 2 else "even"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Runs(folder, models("qwen2_5_vl"))


def options(runs: Runs) -> dict[str, Any]:
    return {
        "model": {"path": str(runs.model), "dtype": "float32", "gradient_checkpointing": False},
        "data": {
            "train": {"name": "table", "path": str(runs.folder / "train.jsonl")},
            "eval": {"name": "table", "path": str(runs.folder / "test.jsonl"), "category": "kind"},
            "max_prompt_tokens": 64,
        },
        "rewards": [],
        "algorithm": {"name": "dpo"},
        "sampler": {"max_new_tokens": 6, "group_size": 1},
        "learner": {"lr": 2e-3, "zero_stage": 0},
        "trainer": {"steps": 24, "prompts_per_step": 64, "eval_every": 12, "save_every": 12, "blank_every": 1},
    }


def preferred(run: Path, step: int) -> float:
    """The share of held-out pairs whose chosen answer has the higher log-ratio."""
    found: dict[tuple[str, float], float] = {}
    for each in read_lines(recorded_evaluations(run)[step]):
        log_ratio = np.subtract(each["learner_logprobs"], each["reference_logprobs"]).sum()
        found[each["prompt_id"], each["rewards"]["score"]] = float(log_ratio)
    return float(np.mean([log_ratio > found[prompt, 0.0] for (prompt, score), log_ratio in found.items() if score]))


def test_a_preference_is_learned_from_the_picture_and_goes_on_to_the_same_bits_after_a_kill(
    runs: Runs, nursery: Any, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = warm_mmrl("train", runs.config("plain", **options(runs)))
    assert done.returncode == 0, done.stderr
    assert "3 evaluations of 150 comparisons" in done.stdout and "pref 0.50" in done.stdout
    assert "mmrl eval --model" in done.stdout
    logged = metrics(runs.folder / "plain")
    assert (logged[0]["eval/accuracy"], logged[0]["eval/margin"]) == (0.5, 0.0)
    assert logged[24]["eval/accuracy"] > 0.65 and logged[24]["eval_blank/accuracy_gap"] > 0.05
    assert preferred(runs.folder / "plain", 24) == logged[24]["eval/accuracy"], "by the recorded log-probs"
    done = warm_mmrl("eval", "--model", runs.folder / "plain", "--blank-images", "--output", runs.folder / "evaluated")
    assert done.returncode == 0, done.stderr
    evaluated = json.loads((runs.folder / "evaluated" / "results.json").read_text())
    again = {name: each["value"] for name, each in evaluated["metrics"].items()}
    assert again == {name: value for name, value in logged[24].items() if name.startswith("eval/")}, "to the bit"
    assert "eval/accuracy/even" in again and evaluated["settings"]["reference"] == str(runs.model)
    assert evaluated["blank_images"]["difference"]["eval/accuracy"]["value"] > 0.05
    config = runs.config(**options(runs))
    killed = nursery.train([str(config)], KILL)
    assert killed.status == -9 and steps(runs.folder / "run")[-1] == "step-000012", killed.log
    done = warm_mmrl("train", config)
    assert done.returncode == 0, done.stderr
    expected, found = outcome(runs.folder / "plain"), outcome(runs.folder / "run")
    for part in expected:
        assert found[part] == expected[part], part
    assert [event["step"] for event in events(runs.folder / "run", "resumed")] == [12]


@pytest.mark.slow  # test_lost_ranks.py has two ranks that go on to the same bits
def test_two_ranks_go_on_to_the_same_bits_after_a_kill_while_a_checkpoint_is_written(
    runs: Runs, nursery: Any, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Three pairs of pictures on two ranks, each pair a micro-batch of its own."""
    sections = options(runs)
    sections["data"] = {**sections["data"], "eval": None}
    sections["learner"] |= {"zero_stage": 3, "tokens_per_microbatch": 10}
    sections["trainer"] = {"steps": 3, "prompts_per_step": 3, "save_every": 1, "eval_every": 0}
    sections["cluster"] = {"name": "ray", "ranks": 2}
    unbroken, broken = runs.config("unbroken", **sections), runs.config("broken", **sections)
    done = warm_mmrl("train", unbroken)
    assert done.returncode == 0, done.stderr
    killed = nursery.train([str(broken)], Blow(at=("point", "checkpoint.filled", 3)))
    assert killed.status == -9 and steps(runs.folder / "broken")[-1] == "step-000001", killed.log
    done = warm_mmrl("train", broken)
    assert done.returncode == 0, done.stderr
    assert compare(runs.folder / "broken", runs.folder / "unbroken") == []
    assert [event["step"] for event in events(runs.folder / "broken", "resumed")] == [1]
