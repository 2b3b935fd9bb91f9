"""Origins of a config's values, through runs and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.commands.cli import main
from mmrl.runs.origins import merged_origins, read_origins
from tests.faults.runs import Runs


def test_a_value_keeps_its_first_origin_when_the_run_goes_on_with_its_own_config(tmp_path: Path) -> None:
    before = {"learner.lr": "a.yaml:3", "trainer.steps": "a.yaml:9", "rewards.0.name": "b.yaml:1", "old": "a.yaml:1"}
    own = tmp_path / "config.yaml"
    now = {
        "learner.lr": f"{own}:7",
        "trainer.steps": "override trainer.steps=9",
        "rewards.0.name": f"{own}:30",
        "sampler.top_p": f"{own}:12",
        "sampler.top_k": "default",
    }
    merged = merged_origins(now, before, tmp_path, ["rewards"])
    assert merged == now | {"learner.lr": "a.yaml:3"}
    assert merged_origins(now, before, tmp_path / "another", []) == now
    assert merged_origins(now, {}, tmp_path, []) == now


def test_origins_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    assert read_origins(tmp_path) == {}
    for text in ("[1", "[1]", "\xff"):
        (tmp_path / "origins.json").write_text(text, encoding="latin-1")
        assert read_origins(tmp_path) == {}


def test_a_run_records_where_each_value_was_written(fake_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "correct-horse")
    config = fake_runs.config(trainer={"steps": 2})
    assert fake_runs.train(config, "learner.weight_decay=0.125") == 0
    run = fake_runs.folder / "run"
    first = read_origins(run)
    assert first["learner.lr"] == f"{config}:1"  # its JSON is one line
    assert first["learner.weight_decay"] == "override learner.weight_decay=0.125"
    assert first["sampler.top_k"] == "default"
    assert main(["train", str(run / "config.yaml"), "trainer.steps=3", "--allow-change", "trainer.steps"]) == 0
    second = json.loads((run / "origins.json").read_text())
    assert second == first | {"trainer.steps": "override trainer.steps=3"}
