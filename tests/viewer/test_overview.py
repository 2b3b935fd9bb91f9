"""The document of several runs: their states and last values, and the settings that they are seeds of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.runs.directory import RunDirectory
from mmrl.runs.sweeps import SWEEP
from mmrl.viewer.overview import overview_document
from mmrl.viewer.pages import Pages
from tests.viewer.made_run import HOSTILE
from tests.viewer.made_sweep import make_plain_run, make_sweep, write_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("made") / "rates")


def overview(*paths: Path) -> Any:
    return json.loads(json.dumps(Pages(paths).document("overview"), allow_nan=False))


def test_a_sweeps_points_have_state_step_last_values_and_their_setting(sweep: Path) -> None:
    found = overview(sweep)
    assert [each["state"] for each in found["runs"]] == ["done"] * 4 + ["failed", "waiting"]
    assert found["runs"][4]["reason"] == f"the loss is not finite {HOSTILE}"
    assert [(each["step"], each["steps"]) for each in found["runs"]] == [(8, 8)] * 4 + [(4, 8), (None, None)]
    assert [each["seed"] for each in found["runs"]] == [0, 1, 2] * 2
    assert found["runs"][1]["last"] == pytest.approx({"eval/accuracy": 0.31, "loss/total": 2 / 9, "reward/mean": 0.9})
    assert found["runs"][4]["last"]["policy/entropy"] is None and found["runs"][5]["last"] == {}
    assert found["settings"] == [
        {"name": "learner.lr=0.001", "values": {"learner.lr": 0.001}, "runs": [0, 1, 2]},
        {"name": "learner.lr=0.01", "values": {"learner.lr": 0.01}, "runs": [3, 4, 5]},
    ]
    runs = Pages([sweep]).document("runs")
    assert [each["name"] for each in runs][:2] == ["lr0.001-s0", "lr0.001-s1"]
    assert runs[5]["problem"] == "this point of the sweep has not begun" and runs[4]["problem"] is None


@pytest.mark.parametrize(
    ("keys", "best"), [("", {}), ("best_metric: x", {"x": 3.0}), ("best_metric: x, best_is: min", {"x": -1.0})]
)
def test_a_run_tells_the_best_value_of_the_metric_that_its_config_names(
    tmp_path: Path, keys: str, best: dict[str, float]
) -> None:
    run = make_plain_run(tmp_path / "run", steps=1)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("trainer: {", f"trainer: {{{keys}{', ' * bool(keys)}"))
    lines = [{"step": step, "attempt": 1, "time": 5.0, "x": x} for step, x in enumerate([1.0, 3.0, -1.0, None, 2.0])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = overview(run)["runs"][0]
    assert found["best"] == best and found["last"] == {"x": 2.0}


def test_a_sweep_of_which_no_point_has_begun_is_shown(tmp_path: Path) -> None:
    write_sweep(tmp_path / "new", {"learner.lr": [1]}, [("a", {"learner.lr": 1}, 0), ("b", {"learner.lr": 1}, 1)])
    found = overview(tmp_path / "new")
    assert [each["state"] for each in found["runs"]] == ["waiting"] * 2
    assert found["settings"] == [{"name": "learner.lr=1", "values": {"learner.lr": 1}, "runs": [0, 1]}]


def test_runs_that_differ_in_their_seed_alone_are_a_setting_without_a_sweep(tmp_path: Path) -> None:
    runs = [make_plain_run(tmp_path / f"slow-{seed}", seed=seed) for seed in (0, 1)]
    runs += [make_plain_run(tmp_path / f"fast-{seed}", rate=0.01, seed=seed) for seed in (0, 1)]
    assert overview(*runs)["settings"] == [
        {"name": "learner.lr=0.001", "values": {"learner.lr": 0.001}, "runs": [0, 1]},
        {"name": "learner.lr=0.01", "values": {"learner.lr": 0.01}, "runs": [2, 3]},
    ]
    assert [each["name"] for each in overview(*runs[:2])["settings"]] == ["slow-0 and 1 more"]
    assert [each["name"] for each in overview(*runs[1:3])["settings"]] == ["slow-1", "fast-0"]


def test_two_sweeps_with_the_same_values_are_told_apart(sweep: Path, tmp_path: Path) -> None:
    other = write_sweep(tmp_path / "again", {"learner.lr": [0.001]}, [("a", {"learner.lr": 0.001}, 0)])
    names = [each["name"] for each in overview(sweep, other)["settings"]]
    assert names == ["rates: learner.lr=0.001", "rates: learner.lr=0.01", "again: learner.lr=0.001"]


def test_an_axis_that_holds_a_secret_is_shown_without_it(tmp_path: Path) -> None:
    values = {"rewards.0.options.api_key": "hunter22hunter22"}
    write_sweep(tmp_path / "keys", {"rewards.0.options.api_key": list(values.values())}, [("a", values, 0)])
    assert "hunter22" not in json.dumps(overview(tmp_path / "keys"))


def test_a_live_run_runs_and_a_killed_one_has_stopped(tmp_path: Path) -> None:
    killed = make_plain_run(tmp_path / "killed", end=None)
    live = RunDirectory.create(make_plain_run(tmp_path / "live", end=None), new=False)
    try:
        states = [(each["state"], each["reason"]) for each in overview(killed, live.path)["runs"]]
    finally:
        live.release()
    assert states == [("stopped", "it was killed"), ("running", "")]


def test_a_runs_seconds_are_those_of_its_attempts(tmp_path: Path) -> None:
    run = make_plain_run(tmp_path / "run", steps=1)
    lines = [
        {"attempt": 1, "time": 100.0, "resumed_from": None},
        {"attempt": 1, "time": 107.0, "exit_code": 10, "message": "stopped by SIGTERM"},
        {"attempt": 2, "time": 1000.0, "resumed_from": 0},
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    for time, seconds in ((1030.0, 37.0), (50.0, 7.0)):  # of the last step; an attempt has no negative time
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "attempt": 2, "time": time, "x": 1}) + "\n")
        assert overview(run)["runs"][0]["seconds"] == seconds


def test_a_run_that_cannot_be_understood_hides_no_other(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages([sweep, tmp_path / "nothing"])
    (metrics := pages.runs[0].path / "metrics.jsonl").stat()
    kept = type(pages.runs[0]).kept

    def failing(self: Any, name: Any, file: Path, *rest: Any, **more: Any) -> Any:
        if file == metrics:
            raise KeyError("at once")
        return kept(self, name, file, *rest, **more)

    monkeypatch.setattr(type(pages.runs[0]), "kept", failing)
    found = overview_document(pages.runs)["runs"]
    assert found[0]["state"] is None and found[0]["reason"] == "it cannot be understood: KeyError: 'at once'"
    assert found[1]["state"] == "done" and found[6]["state"] is None and found[6]["reason"] == ""


def test_a_damaged_record_of_a_sweep_is_an_error_before_anything_starts(sweep: Path, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "bad", {}, [])
    with pytest.raises(ConfigError, match="the sweep has no runs"):
        Pages([folder])
    (folder / SWEEP).write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        Pages([folder])
    (folder / SWEEP).unlink()
    (folder / SWEEP).symlink_to(sweep / SWEEP)
    with pytest.raises(DataError, match="a link that leads out"):
        Pages([folder])
    (folder / SWEEP).unlink()
    os.mkfifo(folder / SWEEP)
    with pytest.raises(ConfigError, match="there is no run"):
        Pages([folder])
