"""Runs on real engines whose sampler is a step behind its learner: the same files twice, whoever waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrl.rollout.records import read_lines, recorded_steps
from tests.cluster.test_split import APART, folder, trained
from tests.faults.comparison import compare

__all__ = ["folder", "trained"]
pytestmark = pytest.mark.full
AHEAD = (*APART, "trainer.staleness=1", "trainer.steps=4")


@pytest.mark.parametrize("config", ["images", pytest.param("text", marks=pytest.mark.slow)])
def test_two_runs_a_step_ahead_write_the_same_files(config: str, trained: Callable[..., Path]) -> None:
    one, two = (trained(config, *AHEAD, f"trainer.keep_checkpoints={count}") for count in (3, 4))
    assert not compare(one, two, same_checkpoints=False)
    for step, path in recorded_steps(one).items():
        assert {line["weight_version"] for line in read_lines(path)} == {2 * max(0, step - 2)}
    for line in map(json.loads, (one / "metrics.jsonl").read_text().splitlines()[1:]):
        assert line["staleness/max"] == 2 * (line["step"] > 1)
        assert line["mismatch/probe_abs_mean"] <= line["mismatch/probe_abs_max"] < 1e-4
        assert ("mismatch/logprob_abs_max" in line) == (line["step"] == 1)  # later tokens are all of older weights
