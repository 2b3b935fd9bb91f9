"""States of runs, and sweeps read from their folders."""

from __future__ import annotations

import json
import math
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
from mmrl.runs.sweeps import Sweep, is_sweep, load_sweep, usual_metric
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
    sweep = load_sweep(path)
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


def test_its_table_has_mean_and_deviation_over_the_seeds_that_are_done(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep", seeds=[0, 1])
    make_run(path / "lr-1e-05_seed-0", {0: 0.1, 1: 0.7, 2: 0.5})
    make_run(path / "lr-1e-05_seed-1", {0: 0.2, 2: 0.9})
    make_run(path / "lr-0.5_seed-0", {0: 0.1, 2: 0.85})
    make_run(path / "lr-0.5_seed-1", {0: 0.2, 2: 1.0}, None)
    table = load_sweep(path).table()
    assert [row.setting.values["learner.lr"] for row in table.rows] == [0.5, 1e-05]
    assert [row.values for row in table.rows] == [{0: 0.85}, {0: 0.5, 1: 0.9}]
    assert (table.rows[0].mean, table.rows[0].deviation) == (0.85, None)
    assert table.rows[1].mean == pytest.approx(0.7) and table.rows[1].deviation == pytest.approx(0.08**0.5)
    assert repr(table).splitlines() == [
        "eval/accuracy: the last value of each run, over the seeds that are done; the most first",
        "",
        "learner.lr  done  mean  deviation  least  most",
        "       0.5   1/2  0.85          -   0.85  0.85  1 stopped",
        "     1e-05   2/2   0.7     0.2828    0.5   0.9",
    ]
    least = load_sweep(path).table("eval/accuracy", is_min=True)
    assert [row.mean for row in least.rows] == pytest.approx([0.7, 0.85])
    assert least.data()["settings"][0]["of_seeds"] == {"0": 0.5, "1": 0.9}
    write(path, config="trainer: {best_metric: eval/accuracy}")
    best = load_sweep(path).table()
    assert best.is_best and best.rows[0].values == {0: 0.85} and best.rows[1].values == {0: 0.7, 1: 0.9}
    write(path, config="trainer: {best_metric: eval/accuracy, best_is: min}")
    assert [row.mean for row in load_sweep(path).table().rows] == pytest.approx([0.1, 0.15])
    with pytest.raises(ConfigError, match="no point has the metric reward/mean") as caught:
        load_sweep(path).table("reward/mean")
    assert caught.value.possible == "eval/accuracy"


def test_a_run_that_is_damaged_or_has_no_number_hides_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep", config="trainer: {best_metric: eval/accuracy}\n")
    make_run(path / "lr-1e-05_seed-0", {0: math.nan, 1: math.nan})
    make_run(path / "lr-1e-05_seed-1", {0: 0.9})
    make_run(path / "lr-0.5_seed-0", {0: math.nan, 1: 0.3})
    make_run(path / "lr-0.5_seed-1", {0: 0.7})
    with (path / "lr-0.5_seed-1/metrics.jsonl").open("a") as file:
        file.write("no record\n")
    first, second = load_sweep(path).table().rows
    assert (first.values, first.states) == ({0: 0.3}, {0: "done", 1: "failed"})
    assert second.setting.values == {"learner.lr": 1e-5} and second.mean is not None and math.isnan(second.mean)


def test_a_table_of_a_sweep_that_has_not_begun_is_there(tmp_path: Path) -> None:
    table = load_sweep(write(tmp_path / "sweep")).table()
    assert table.metric == "eval/accuracy" and [row.mean for row in table.rows] == [None, None]
    assert repr(table).splitlines()[3].split() == ["1e-05", "0/2", "-", "-", "-", "-", "2", "waiting"]


def test_runs_without_an_accuracy_of_that_name_are_compared_by_another(tmp_path: Path) -> None:
    assert usual_metric("", [{"reward/mean": 0.1}, {"eval/easy/accuracy": 1.0}]) == "eval/easy/accuracy"
    assert usual_metric("", [{"reward/mean": 0.1, "loss/total": 1.0}]) == "reward/mean"
    assert usual_metric("trainer: {best_metric: loss/total}", [{"reward/mean": 0.1, "loss/total": 1.0}]) == "loss/total"


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"schema": 2}, DataError, "schema 2, of a later version"),
        ({"points": [{"folder": "../run", "values": {}, "seed": 0}]}, DataError, "'../run' is no name of a point"),
        ({"points": [{"folder": "a/b", "values": {}, "seed": 0}]}, DataError, "'a/b' is no name of a point"),
        ({"points": [{"folder": "a", "seed": 0}]}, DataError, "KeyError: 'values'"),
        ({"axes": []}, DataError, "not as a sweep writes it"),
        ({"seeds": [float("inf")]}, DataError, "OverflowError"),
        ({"config": "trainer: [1"}, DataError, "ConfigError: not valid YAML"),
    ],
)
def test_a_damaged_sweep_is_told(tmp_path: Path, changes: Any, kind: type[MMRLError], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        load_sweep(write(tmp_path / "sweep", **changes))


def test_a_folder_without_a_sweep_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no sweep"):
        load_sweep(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(DataError, match="cannot be read"):
            load_sweep(tmp_path)


def test_a_run_that_is_a_file_and_a_metric_that_is_no_text_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep", config="trainer: {best_metric: [a], best_is: 3}")
    make_run(path / "lr-1e-05_seed-0", {1: 0.7})
    (path / "lr-1e-05_seed-1").write_text("a file")
    table = load_sweep(path).table()
    assert table.metric == "eval/accuracy" and not table.is_min
    assert [point.state for point in table.rows[0].setting.points] == ["done", "waiting"]


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
from mmrl.runs.sweeps import load_sweep
print([(point.state, dict(point.metrics)) for point in load_sweep({str(path)!r}).points])
assert not {{"torch", "transformers", "pydantic", "ray"}} & set(sys.modules), sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "('done', {'eval/accuracy': 0.7}), ('waiting', {})" in done.stdout


def test_a_sweep_says_what_it_is(tmp_path: Path) -> None:
    sweep: Sweep = load_sweep(write(tmp_path / "sweep"))
    assert repr(sweep) == f"Sweep({tmp_path / 'sweep'}, 2 settings x 2 seeds)"
