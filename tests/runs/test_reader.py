"""A run read from its folder, live or finished."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.runs.reader import NewMetrics, Run, load_run
from tests.faults.runs import Runs, at


def lines(path: Path, *records: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_is_read_from_its_folder(fake_runs: Runs) -> None:
    path = fake_runs.folder / "run"
    live: list[bool] = []
    with at("checkpoint.filled", 2, lambda: live.append(load_run(path).is_live)):
        assert fake_runs.train(fake_runs.config()) == 0
    run = load_run(path)
    assert live == [True] and not run.is_live
    assert run.metrics["reward/mean"] == run.metrics.curve("reward/mean")[4]
    assert list(run.metrics.curve("reward/mean")) == [1, 2, 3, 4]
    with pytest.raises(KeyError, match="no step has 'reward'; there are: "):
        run.metrics["reward"]
    table = run.metrics.frame()
    assert list(table.index) == [0, 1, 2, 3, 4] and table.index.name == "step"
    assert table["reward/mean"].dropna().to_dict() == run.metrics.curve("reward/mean")
    assert run.rollout_steps == [1, 2, 3, 4]
    rollouts = list(run.rollouts(step=2))
    assert len(rollouts) == 12 and len(list(run.rollouts())) == 48
    assert set(rollouts[0].rewards) == {"letters"} and rollouts[0].text == rollouts[0].rollout.text
    assert rollouts[0].rollout.turns == (rollouts[0].text,)
    with pytest.raises(DataError, match="no rollouts of step 20") as caught:
        run.rollouts(step=20)
    assert caught.value.possible == "1, 2, 3, 4"
    assert [each.step for each in run.checkpoints] == [2, 3, 4]
    assert run.policy_path == path / "checkpoints" / "step-000004" / "model"
    assert run.config["sampler"]["group_size"] == 4
    assert f"{path}, step 4, reward/mean" in repr(run)


def test_a_run_is_read_without_torch(fake_runs: Runs) -> None:
    assert fake_runs.train(fake_runs.config(trainer={"steps": 1})) == 0
    code = f"""
import sys, mmrl
assert not {{"torch", "pydantic", "numpy"}} & set(sys.modules), sys.modules.keys()
run = mmrl.load_run({str(fake_runs.folder / "run")!r})
print(run, len(list(run.rollouts(step=1))), run.events, run.policy_path, run.metrics, run.config["model"])
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_steps_that_were_undone_and_not_taken_again_do_not_count(tmp_path: Path) -> None:
    lines(tmp_path / "attempts.jsonl", {"attempt": 1, "resumed_from": None}, {"attempt": 2, "resumed_from": 1})
    old = [{"step": step, "attempt": 1, "time": 0, "a": step, "b": None} for step in (1, 2, 3)]
    lines(tmp_path / "metrics.jsonl", *old, {"step": 2, "attempt": 2, "time": 0, "a": 20.0})
    metrics = load_run(tmp_path).metrics
    assert metrics.curve("a") == {1: 1, 2: 20} and metrics["a"] == 20
    assert math.isnan(metrics["b"]) and len(metrics) == 2


def test_new_metrics_are_told_once_also_of_a_file_that_takes_the_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines(path, {"step": 1, "a": 1.0})
    new = NewMetrics(tmp_path)
    assert list(new.read()) == []
    lines(path, {"step": 2, "a": None})
    with path.open("a") as file:
        file.write('{"step": 3')
    ((step, values),) = new.read()
    assert step == 2 and math.isnan(values["a"])
    with path.open("a") as file:
        file.write(', "a": 3.0}\n')
    assert list(new.read()) == [(3, {"a": 3.0})]
    path.rename(tmp_path / "aside")
    assert list(new.read()) == []
    lines(path, {"step": 1, "a": 4.0})
    assert list(new.read()) == [(1, {"a": 4.0})]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        load_run(tmp_path)
    with pytest.raises(DataError, match="no checkpoint yet"):
        _ = Run(tmp_path).policy_path
