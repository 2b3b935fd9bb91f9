"""Runs on two nodes of which the second sees none of the driver's files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import rollouts

pytestmark = pytest.mark.slow  # test_lost_ranks.py has runs of one rank on each node, with the same checks
TOGETHER, APART = ["cluster.ranks=2"], ["cluster.sampler_ranks=1", "cluster.learner_ranks=1"]


@pytest.mark.parametrize(
    ("cpus", "sampler", "sides"),
    [
        pytest.param((0, 2), "hf", TOGETHER, id="both ranks on the second"),
        pytest.param((1, 1), "hf", APART, id="one samples here, one learns there"),
    ],
)
def test_a_node_without_the_drivers_files_trains(cpus, sampler, sides, work, household, start_cluster):
    run = f"run-{cpus[0]}-{len(sides)}"
    address = start_cluster(*cpus)
    overrides = [f"trainer.run_dir={run}", "cluster.name=ray", *sides, f"cluster.address={address}"]
    overrides += [f"sampler.name={sampler}"]
    before = sent_files()
    result = household.run("train", "config.yaml", *overrides, folder=work)
    assert result.returncode == 0, result.stderr
    assert_trained(work / run, cpus[0], before)
    assert_seen_by_the_doctor(household, work, overrides)


def sent_files() -> set[Path]:
    """The folders of files that nodes have been sent and that are not removed yet, of all runs."""
    return set(Path("/tmp").glob("mmrl-node-*"))


def assert_seen_by_the_doctor(household: Any, work: Path, overrides: Sequence[str]) -> None:
    """It says which node sees the driver's files."""
    seen = household.run("doctor", "config.yaml", "--quick", "--json", *overrides, folder=work)
    nodes = [row["found"] for row in json.loads(seen.stdout)["findings"] if row["area"] == "nodes"]
    assert sorted("run folder private, model private" in found for found in nodes) == [False, True], nodes


def assert_trained(run: Path, ranks_here: int, before: set[Path]) -> None:
    """Compare what a run of ``work``, so many ranks of which share its files, has left with what one node would.

    Args:
        before: ``sent_files`` before the run.
    """
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {m["step"] for m in metrics} >= {0, 1, 2}
    assert all(m["mismatch/logprob_abs_max"] < 1e-4 for m in metrics[1:])
    environment: dict[str, Any] = json.loads((run / "environment.json").read_text())
    shares = [rank["shares_files"] for rank in environment["engine"]["ranks"]]
    assert shares == [rank < ranks_here for rank in range(2)]
    assert len(rollouts(run, 2)) == 6
    assert {file.name for file in (run / "checkpoints" / "step-000002" / "model").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
    }  # fmt: skip
    left = sent_files() - before  # what was sent is removed; runs beside this one still may
    deadline = time.monotonic() + 120
    while any(folder.exists() for folder in left) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not [folder for folder in left if folder.exists()]
