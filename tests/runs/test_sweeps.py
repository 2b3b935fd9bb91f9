"""States of runs, and sweeps read from their folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError, DataError, MMRLError
from mmrl.runs.directory import RunDirectory
from mmrl.runs.reader import Run
from mmrl.runs.standing import Standing
from mmrl.runs.sweeps import Sweep, is_sweep, read_sweep
from tests.faults.runs import Runs, at, stop


def write(folder: Path, **changes: Any) -> Path:
    """A sweep of two learning rates and two seeds."""
    points = [
        {"folder": f"lr-{lr}_seed-{seed}", "values": {"learner.lr": lr}, "seed": seed}
        for lr in (1e-5, 0.5)
        for seed in (0, 1)
    ]
    record = {"schema": 1, "config": "trainer:\n  steps: 2\n", "axes": {"learner.lr": [1e-5, 0.5]}, "seeds": [0, 1]}
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(record | {"points": points} | changes))
    return folder


def make_run(folder: Path, values: dict[int, float], code: int | None = 0, message: str = "") -> None:
    directory = RunDirectory.create(folder)
    directory.begin_attempt(None)
    for step, value in values.items():
        directory.append_metrics(step, {"eval/accuracy": value})
    if code is not None:
        directory.end_attempt(code, message)
    directory.release()


def test_a_sweep_has_its_points_with_their_states_and_metrics(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep")
    make_run(path / "lr-1e-05_seed-0", {0: 0.1, 1: 0.7, 2: 0.6})
    make_run(path / "lr-1e-05_seed-1", {0: 0.2}, None)
    make_run(path / "lr-0.5_seed-0", {0: 0.2}, 6, "the weights are not finite")
    sweep = read_sweep(path)
    assert is_sweep(path) and not is_sweep(path / "lr-0.5_seed-0")
    assert [point.state for point in sweep.points] == ["done", "stopped", "failed", "waiting"]
    assert [point.seed for point in sweep.points] == [0, 1, 0, 1]
    assert sweep.points[0].metrics["eval/accuracy"] == 0.6
    assert sweep.points[0].best("eval/accuracy") == 0.7
    assert sweep.points[0].best("eval/accuracy", is_min=True) == 0.1
    assert not sweep.points[3].metrics
    assert sweep.points[2].run.standing == Standing("failed", "the weights are not finite")
    first, second = sweep.settings
    assert str(first) == "learner.lr=1e-05" and second.values == {"learner.lr": 0.5}
    assert [point.name for point in second.points] == ["lr-0.5_seed-0", "lr-0.5_seed-1"]


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"schema": 2}, DataError, "schema 2, of a later version"),
        ({"points": [{"folder": "../run", "values": {}, "seed": 0}]}, DataError, "'../run' is no name of a point"),
        ({"points": [{"folder": "a/b", "values": {}, "seed": 0}]}, DataError, "'a/b' is no name of a point"),
        ({"points": [{"folder": "a", "seed": 0}]}, DataError, "KeyError: 'values'"),
        ({"axes": []}, DataError, "not as a sweep writes it"),
    ],
)
def test_a_damaged_sweep_is_told(tmp_path: Path, changes: Any, kind: type[MMRLError], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        read_sweep(write(tmp_path / "sweep", **changes))


def test_a_folder_without_a_sweep_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no sweep"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_sweep(tmp_path)


def test_a_run_knows_its_state(fake_runs: Runs) -> None:
    """From waiting over an error before the first attempt and a signal to the end."""
    run = Run(fake_runs.folder / "run")
    seen: list[str] = []
    assert run.state == "waiting"
    bad = fake_runs.config(rewards=[{"name": "math"}])
    rows = fake_runs.rows.read_text()
    fake_runs.rows.write_text("")
    assert fake_runs.train(bad) != 0
    assert run.state == "failed" and "rows.jsonl" in run.standing.reason
    fake_runs.rows.write_text(rows)
    with at("checkpoint.filled", 2, lambda: seen.append(run.state)), at("fake.generate", 3, stop):
        assert fake_runs.train(fake_runs.config()) == 10
    assert run.standing == Standing("stopped", "stopped by SIGTERM")
    assert fake_runs.train(fake_runs.config()) == 0
    assert run.standing == Standing("done") and seen == ["running"]


def test_a_sweep_is_read_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep")
    make_run(path / "lr-1e-05_seed-0", {1: 0.7})
    code = f"""
import sys
from mmrl.runs.sweeps import read_sweep
print([(point.state, dict(point.metrics)) for point in read_sweep({str(path)!r}).points])
assert not {{"torch", "transformers", "pydantic", "ray"}} & set(sys.modules), sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "('done', {'eval/accuracy': 0.7}), ('waiting', {})" in done.stdout


def test_a_sweep_says_what_it_is(tmp_path: Path) -> None:
    sweep: Sweep = read_sweep(write(tmp_path / "sweep"))
    assert repr(sweep) == f"Sweep({tmp_path / 'sweep'}, 2 settings x 2 seeds)"
