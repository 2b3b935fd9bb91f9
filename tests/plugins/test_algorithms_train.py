"""Every algorithm on the real learner: a tiny vision-language model, two steps of two updates each, in this process."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mmrl.cli import main
from mmrl.engine.rank import RankEngine
from mmrl_datasets.digits import write_digits

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["mmrl.algorithms"]
ALGORITHMS = sorted(PLUGINS.keys() - {"sft"})
REWARDS = '''\
"""Each completion is right or wrong by the parity of its first token, where that is not the same for all."""

def even(rollouts):
    return [float(rollout.token_ids[0] % 2 == 0) for rollout in rollouts]

def mostly_constant(rollouts):
    """Only the prompts with a digit from 0 to 3 have right and wrong completions."""
    digit = int(rollouts[0].answer)
    return even(rollouts) if digit < 4 else [float(digit > 6)] * len(rollouts)

def constant(rollouts):
    return [1.0] * len(rollouts)
'''


@dataclass
class Run:
    """A finished run."""

    path: Path

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the training steps."""
        return self._lines("metrics.jsonl")[1:]

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl") if (self.path / "events.jsonl").exists() else []

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return self._lines(f"rollouts/step-{step:06d}.jsonl")

    def weights(self) -> dict[str, Any]:
        return load_file(self.path / "checkpoints" / "step-000002" / "model" / "model.safetensors")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def train(models, start, tmp_path_factory) -> Callable[..., Run]:
    """Runs an algorithm with its own defaults; further words as on the command line.

    ``start`` leaves the process group at the end of all tests: DeepSpeed does not find its way into a second one.
    """
    folder = tmp_path_factory.mktemp("algorithms")
    write_digits(folder / "digits", train=64, test=1)
    (folder / "rewards.py").write_text(REWARDS)
    config = {
        "model": {"path": str(models("qwen2_5_vl"))},
        "data": {"train": {"name": "table", "path": str(folder / "digits"), "split": "train"}, "max_prompt_tokens": 64},
        "rewards": [{"name": f"{folder / 'rewards.py'}:even", "label": "right"}],
        "algorithm": {"name": "named by each test"},
        "sampler": {"name": "hf", "group_size": 4, "max_new_tokens": 8},
        "learner": {"lr": 1e-3, "zero_stage": 0, "minibatches": 2},
        "trainer": {"steps": 2, "prompts_per_step": 4},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(name: str, *words: str, reward: str = "even") -> Run:
        path = tmp_path_factory.mktemp(name)
        words += (f"algorithm.name={name}", f"trainer.run_dir={path}", f"rewards.0.name={folder / 'rewards.py'}:{reward}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankEngine, "close", lambda self: None)
            assert main(["train", str(folder / "config.yaml"), *words]) == 0
        return Run(path)

    return run


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_trains(name, train, models):
    run = train(name)
    before, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    assert len(run.steps) == 2
    for step in run.steps:
        broken = [key for key, value in step.items() if value is None or not math.isfinite(value)]
        assert broken == []
        assert step["policy/grad_norm"] > 0 and step["advantage/abs_mean"] > 0
    moved = {key for key, weight in before.items() if not np.array_equal(weight, after[key])}
    assert moved == before.keys()
    assert all(np.isfinite(weight).all() for weight in after.values())
