"""``mmrl sweep``: its words, its points and their folders; runs that end, fail, are stopped and killed, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.commands import child_command
from mmrl.commands.cli import main
from mmrl.commands.sweep import schedule
from mmrl.commands.sweep.grammar import read_words, words_of
from mmrl.commands.sweep.plan import plan_sweep
from mmrl.errors import ConfigError
from mmrl.runs.files import locked
from mmrl.runs.reader import Run
from mmrl.runs.sweeps import load_sweep
from tests.faults.runs import records

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model": {"path": "m"},
    "data": {"train": {"name": "table", "path": "rows.jsonl"}},
    "algorithm": {"name": "grpo"},
    "trainer": {"steps": 2, "run_dir": "runs/a"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a config whose runs are made up."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(child_command, "MODULE", "tests.faults.quick_runs")
    monkeypatch.setattr(child_command, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(schedule, "LOOK_S", 0.02)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(json.dumps(CONFIG))
    return tmp_path


def sweep(*words: str) -> int:
    return main(["sweep", "a.yaml", *words])


def attempts(point: Path) -> int:
    return len([record for record in records(point / "attempts.jsonl") if "resumed_from" in record])


# Words


def test_axes_are_values_between_commas_outside_of_brackets_and_quotes() -> None:
    words = read_words(
        [
            *("learner.lr=1e-5, 3e-5", "algorithm={name: grpo, a: 1},{name: dapo}", "data.train.id='a,b'"),
            *("x.y=[1, 2]", "data.names=\"a,\\\"b\",it's,'c''d,e'"),
        ],
        "0-2,7",
    )
    assert words.axes == {
        "learner.lr": [1e-5, 3e-5],
        "algorithm": [{"name": "grpo", "a": 1}, {"name": "dapo"}],
        "data.names": ['a,"b', "it's", "c'd,e"],
    }
    assert words.overrides == ["data.train.id='a,b'", "x.y=[1, 2]"]
    assert words.seeds == [0, 1, 2, 7]
    combinations = list(words.combinations())
    assert len(combinations) == 12
    assert combinations[0][0] == [
        "learner.lr=1e-5", "algorithm={name: grpo, a: 1}", "data.train.id='a,b'", "x.y=[1, 2]", 'data.names="a,\\"b"'
    ]  # fmt: skip
    assert combinations[-1][1] == {"learner.lr": 3e-5, "algorithm": {"name": "dapo"}, "data.names": "c'd,e"}


def test_values_from_python_have_the_same_words() -> None:
    given = {"learner.lr": [1e-5, 0.5], "a.text": ["x, y", "it's, so", "", None, True], "a.map": {"b": [1, 2]}}
    words = read_words(words_of(given))
    assert words.axes == {"learner.lr": [1e-5, 0.5], "a.text": ["x, y", "it's, so", "", None, True]}
    assert words.overrides == ["a.map={b: [1, 2]}"]
    assert words_of(["learner.lr=1,2"]) == ["learner.lr=1,2"]
    arrays = {"a": np.array([1e-5, 0.5]), "b": [np.int64(2), {"c": np.float64(0.5)}], "d": range(2)}
    assert words_of(arrays) == ["a=1.0e-05,0.5", "b=2,{c: 0.5}", "d=0,1"]
    with pytest.raises(ConfigError, match=r"learner.lr has no values"):
        words_of({"learner.lr": []})
    with pytest.raises(ConfigError, match=r"learner.lr has a value that no config can hold"):
        words_of({"learner.lr": [1.0, object()]})


@pytest.mark.parametrize(
    ("words", "seeds", "expected"),
    [
        (
            ["learner.lr=1e-5,0.00001"],
            None,
            "learner.lr has the value 1e-05 twice|learner.lr has the value 1.0e-05 twice",
        ),
        (["learner.lr=1,,2"], None, "a value of learner.lr is empty"),
        (["learner.lr=1,2", "learner.lr=3"], None, "learner.lr is given twice"),
        (["trainer.run_dir=a,b"], None, "trainer.run_dir may not differ between points"),
        (["trainer.best_metric=a,b"], None, "trainer.best_metric may not differ between points"),
        (
            ["trainer={steps: 2, seed: 4},{steps: 3}"],
            None,
            "trainer as a whole may not differ .* it holds trainer.seed",
        ),
        (["trainer.seed=1,2"], "3", "--seeds and trainer.seed are both given"),
        (["learner.lr=1,2"], "0,1,0", "the seed 0 is given twice"),
        (["learner.lr=1,2"], "", "'' is no seed"),
        (["learner.lr=1,2"], "0-9999999999", "is no seed"),
        (["learner.lr=[1,2"], "0", "not valid YAML"),
        (["trainer.steps=3"], None, "nothing differs between points"),
        (["learner.lr=1,2"], "0-5000", "the sweep would have 10002 points"),
    ],
)
def test_words_that_make_no_sweep_are_refused(words: list[str], seeds: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_words(words, seeds)


# Points


def test_points_have_the_configs_of_train_and_names_that_tell_them(folder: Path) -> None:
    long = "x" * 300
    words = ["algorithm={name: grpo},{name: dapo}", "algorithm.clip_low=0.1", f"model.path=m,{long}"]
    plan = plan_sweep([Path("a.yaml")], read_words(words, "3,4"))
    assert plan.folder == Path("runs/a-sweep") and len(plan.points) == 8
    first, last = plan.points[0], plan.points[-1]
    assert first.config["algorithm"]["name"] == "grpo" and first.config["algorithm"]["clip_low"] == 0.1
    assert last.config["algorithm"]["name"] == "dapo" and last.config["model"]["path"] == long
    assert first.config["trainer"]["seed"] == 3 and last.config["trainer"]["seed"] == 4
    assert first.config["trainer"]["run_dir"] == str(first.run) == f"runs/a-sweep/{first.name}"
    assert first.name.startswith("algorithm-name-grpo-") and first.name.endswith("_path-m_seed-3")
    assert len(last.name) < 100 and len({point.name for point in plan.points}) == 8
    one = plan_sweep([Path("a.yaml")], read_words(["learner.lr=1e-4,1e-5"], "3"))
    assert [point.name for point in one.points] == ["lr-0.0001_seed-3", "lr-1e-05_seed-3"]
    two = plan_sweep([Path("a.yaml")], read_words(["learner.epochs=1,2", "trainer.steps=null", "trainer.epochs=1,2"]))
    assert two.points[1].name == "learner.epochs-1_trainer.epochs-2_seed-0"
    assert "steps" not in two.points[0].config["trainer"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["learner.lrr=1e-5,3e-5"], ["unknown key learner.lrr", "override learner.lrr=1e-5", "did you mean lr?"]),
        (["learner.lr=1e-5,7"], ["less than or equal to 1, not 7", "override learner.lr=7"]),
        (["algorithm.name=grpo,nope"], ["no installed package has an algorithm plugin called 'nope'", "possible: "]),
        (["learner.lr=1e-5,x", "sampler.top_p=1.0,2.0"], ["learner.lr", "sampler.top_p"]),
        (
            ["learner.lr=x,y", "sampler.top_p=2.0"],
            ["mmrl: 3 errors in the config\n\nsampler.top_p", "not 'x'", "not 'y'"],
        ),
        (["learner.lr=1e-5,1e-4", "learner={lr: 1}"], ["learner.lr=1e-05 and learner.lr=0.0001 have the same config"]),
        (
            [f"model.path={','.join(f'hf_{letter * 20}' for letter in 'ab')}"],
            ["two runs have model.path=[redacted]: they differ in a secret alone"],
        ),
    ],
)
def test_all_points_are_checked_before_the_first_starts(
    folder: Path, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*words, "--seeds", "0,1") in (2, 4)
    told = capsys.readouterr().err
    assert all(part in told for part in expected), told
    assert told.count("override learner.lrr") <= 1  # once for all of its values and seeds
    assert told.count("sampler.top_p") <= 2 and told.count("errors in the config") <= 1
    assert not (folder / "runs").exists()


def test_a_folder_that_holds_something_else_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "b").mkdir()
    (folder / "b" / "notes.txt").write_text("mine")
    assert sweep("learner.lr=1e-3,1e-2", "--folder", "b") == 2
    assert "b holds other files, and no sweep: notes.txt" in capsys.readouterr().err
    assert sweep("learner.lr=1e-3,1e-2", "--dry-run") == 0
    assert "lr-0.001_seed-0" in capsys.readouterr().out and not (folder / "runs").exists()
    (folder / "runs" / "a-sweep").mkdir(parents=True)
    with locked(folder / "runs" / "a-sweep"):
        assert sweep("learner.lr=1e-3,1e-2") == 5
    assert "another process is using" in capsys.readouterr().err
    assert sweep("learner.lr=1e-3,1e-2", "--parallel", "0") == 2
    assert main(["sweep", "learner.lr=1e-3,1e-2"]) == 2
    assert sweep("learner.lr=1e-3,1e-2", "--json") == 2


# Runs


def test_a_sweep_runs_its_points_tells_failures_and_takes_in_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "runs" / "a-sweep"
    assert sweep("learner.lr=1e-3,0.5", "--seeds", "0") == 6
    done, failed = path / "lr-0.001_seed-0", path / "lr-0.5_seed-0"
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "lr-0.001_seed-0  started" in lines and "eval/accuracy 0.012" in captured.out
    assert [line for line in lines if line.startswith("lr-0.5_seed-0  failed after")]
    assert "1 point did not come to the end:\n  lr-0.5_seed-0: the weights are not finite" in captured.err
    assert f"log: {Path('runs/a-sweep/logs/lr-0.5_seed-0.log')}" in captured.err
    assert (path / "logs" / "lr-0.001_seed-0.log").read_text() == "lr-0.001_seed-0 begins after step None\n"
    assert "begins" not in captured.out
    assert [point.state for point in load_sweep(path).points] == ["done", "failed"]
    assert main(["sweep", "--show", str(path), "--metric", "loss/total", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [setting["of_seeds"] for setting in shown["settings"]] == [{"0": 0.001}, {}]
    assert shown["settings"][1]["points"]["0"] == {"run": str(failed), "state": "failed"}
    assert main(["sweep", "--show", str(path), "--metric", "reward/mean"]) == 2
    assert "possible: eval/accuracy, loss/total" in capsys.readouterr().err
    assert main(["sweep", "--show", str(path), "learner.lr=1"]) == 2
    assert "--show takes no learner.lr=1" in capsys.readouterr().err
    before = json.loads((path / "sweep.json").read_text())
    assert before["axes"] == {"learner.lr": [0.001, 0.5]} and before["seeds"] == [0]
    assert before["points"][1] == {"folder": "lr-0.5_seed-0", "values": {"learner.lr": 0.5}, "seed": 0}

    assert sweep("learner.lr=0.002,1e-3,0.5", "--seeds", "0,1") == 6  # further values and seeds
    assert attempts(done) == 1 and attempts(failed) == 2
    sweep_now = load_sweep(path)
    assert len(sweep_now.points) == 6 and sweep_now.axes == {"learner.lr": [0.002, 0.001, 0.5]}
    assert "lr-0.5_seed-0  goes on" not in capsys.readouterr().out


def test_a_secret_among_values_is_in_no_name_and_no_file_and_the_sweep_goes_on(folder: Path) -> None:
    secret = f"hf_{'k' * 20}"
    words = [f"model.path={secret},m", "--seeds", "0"]
    assert sweep(*words) == 0
    path = folder / "runs" / "a-sweep"
    assert not [each for each in path.rglob("*") if secret[:8] in each.name]
    assert secret not in (path / "sweep.json").read_text()
    assert sweep(f"model.path=m,n,{secret}", "--seeds", "0,1") == 0
    assert [attempts(point.run.path) for point in load_sweep(path).points] == [1] * 6


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["learner.lr=1e-3,3e-3"], "learner.lr had 0.002 too|learner.lr had 2.0e-03 too"),
        (["learner.lr=1e-3,0.002", "--seeds", "1"], "seeds had 0 too"),
        (["learner.lr=1e-3,0.002", "trainer.steps=3"], "trainer.steps: 2 -> 3"),
        (["learner.lr=1e-3,0.002", "learner.epochs=1,2"], "axes: learner.lr -> learner.lr, learner.epochs"),
    ],
)
def test_another_sweep_in_the_folder_is_refused_with_what_differs(
    folder: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_sweep([Path("a.yaml")], read_words(["learner.lr=1e-3,0.002"]))
    plan.make_folder()
    plan.write()
    before = (plan.folder / "sweep.json").read_bytes()
    assert sweep(*words) == 2
    told = capsys.readouterr().err
    assert any(part in told for part in expected.split("|")), told
    assert "another sweep, which this one does not go on with" in told and "--folder" in told
    assert (plan.folder / "sweep.json").read_bytes() == before


@pytest.fixture
def signals() -> Iterator[None]:
    """Handlers as a command finds them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def when(there: Callable[[], bool], act: Callable[[], Any]) -> threading.Thread:
    """Act in a thread once something is there."""

    def wait() -> None:
        deadline = time.monotonic() + 240
        while not there() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 10)])
def test_a_signal_lets_the_run_save_and_the_same_command_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    hold, path = folder / "runs" / "hold", folder / "runs" / "a-sweep"
    hold.parent.mkdir()
    hold.touch()
    first = path / "lr-0.001_seed-0"
    when((first / "metrics.jsonl").exists, lambda: os.kill(os.getpid(), number))
    assert sweep("learner.lr=1e-3,0.002") == code
    captured = capsys.readouterr()
    assert f"mmrl: stopped by {number.name}: the runs end where nothing is lost; a second signal" in captured.err
    assert captured.err.endswith(f"mmrl: stopped by {number.name}; the same command goes on\n")
    assert f"lr-0.001_seed-0  stopped by {number.name}" in captured.out
    assert [point.state for point in load_sweep(path).points] == ["stopped", "waiting"]
    hold.unlink()
    assert sweep("learner.lr=1e-3,0.002") == 0
    assert [point.state for point in load_sweep(path).points] == ["done", "done"]
    assert [record["step"] for record in records(first / "metrics.jsonl")] == [1, 2]  # it went on after step 1


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a sweep in a process of its own."""
    code = "from mmrl.commands import child_command as c; c.MODULE = 'tests.faults.quick_runs'\n"
    code += "from mmrl.commands.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, "sweep", "a.yaml", *words]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_signal_ends_the_sweep_and_its_runs_at_once(folder: Path, start: Any) -> None:
    hold, path = folder / "runs" / "hold", folder / "runs" / "a-sweep"
    hold.parent.mkdir()
    hold.touch()
    ended = start("learner.lr=1e-3,0.002", "trainer.steps=9")
    (folder / "runs" / "deaf").touch()
    first = path / "lr-0.001_seed-0"
    when((first / "metrics.jsonl").exists, lambda: ended.send_signal(signal.SIGINT)).join()
    time.sleep(0.5)
    ended.send_signal(signal.SIGINT)
    assert ended.wait(10) == 130
    when(lambda: not Run(first).is_live, lambda: None).join()
    assert Run(first).standing.reason == "it was killed"


def test_a_sweep_that_is_killed_leaves_runs_that_save_and_goes_on(folder: Path, start: Any) -> None:
    """The runs notice that nobody waits for them; the next sweep waits for one that still saves."""
    hold, path = folder / "runs" / "hold", folder / "runs" / "a-sweep"
    hold.parent.mkdir()
    hold.touch()
    killed = start("learner.lr=1e-3,0.002")
    first = path / "lr-0.001_seed-0"
    when((first / "metrics.jsonl").exists, killed.kill).join()
    assert killed.wait() == -signal.SIGKILL
    hold.unlink()
    assert sweep("learner.lr=1e-3,0.002") == 0
    assert [point.state for point in load_sweep(path).points] == ["done", "done"]
    assert attempts(path / "lr-0.002_seed-0") == 1


def test_a_run_that_another_process_keeps_is_given_up_after_a_while(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "BUSY_S", 0.1)
    busy = folder / "runs" / "a-sweep" / "lr-0.001_seed-0"
    plan = plan_sweep([Path("a.yaml")], read_words(["learner.lr=1e-3,0.002"]))
    plan.make_folder()
    plan.write()
    busy.mkdir()
    with locked(busy):
        assert sweep("learner.lr=1e-3,0.002") == 5
    captured = capsys.readouterr()
    assert "lr-0.002_seed-0  done" in captured.out
    assert "waits for other processes, which are at work on lr-0.001_seed-0" in captured.out
    assert "lr-0.001_seed-0: another process is at work on runs/a-sweep/lr-0.001_seed-0" in captured.err
