"""A run on two nodes of which the second sees none of the driver's files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import rollouts

pytestmark = pytest.mark.full
TOGETHER, APART = ["cluster.ranks=2"], ["cluster.sampler_ranks=1", "cluster.learner_ranks=1"]


@pytest.mark.parametrize(
    ("cpus", "sampler", "sides"),
    [
        pytest.param((1, 1), "vllm", TOGETHER, id="one rank on each node"),
        pytest.param((0, 2), "hf", TOGETHER, id="both ranks on the second", marks=pytest.mark.slow),
        pytest.param((1, 1), "hf", APART, id="one samples here, one learns there", marks=pytest.mark.slow),
    ],
)
def test_a_node_without_the_drivers_files_trains(cpus, sampler, sides, work, household, start_cluster):
    run = f"run-{cpus[0]}-{len(sides)}"
    address = start_cluster(*cpus)
    overrides = [f"trainer.run_dir={run}", "cluster.name=ray", *sides, f"cluster.address={address}"]
    overrides += [f"sampler.name={sampler}"]
    before = set(Path("/tmp").glob("mmrl-node-*"))
    result = household.run("train", "config.yaml", *overrides, folder=work)
    assert result.returncode == 0, result.stderr
    seen = household.run("doctor", "config.yaml", "--quick", "--json", *overrides, folder=work)
    nodes = [row["found"] for row in json.loads(seen.stdout)["findings"] if row["area"] == "nodes"]
    assert sorted("run folder private, model private" in found for found in nodes) == [False, True], nodes
    path = work / run
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert all(m["mismatch/logprob_abs_max"] < 1e-4 for m in metrics[1:])
    environment: dict[str, Any] = json.loads((path / "environment.json").read_text())
    shares = [rank["shares_files"] for rank in environment["engine"]["ranks"]]
    assert shares == [rank < cpus[0] for rank in range(2)]
    assert len(rollouts(path, 2)) == 6
    assert {file.name for file in (path / "checkpoints" / "step-000002" / "model").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
    }  # fmt: skip
    left = set(Path("/tmp").glob("mmrl-node-*")) - before  # what was sent is removed; runs beside this one still may
    deadline = time.monotonic() + 120
    while any(folder.exists() for folder in left) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not [folder for folder in left if folder.exists()]
