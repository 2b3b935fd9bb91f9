"""A run's pace, from its metrics.jsonl and in its lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mmrl.runs.pace import Pace
from mmrl.runs.reader import load_run
from tests.faults.runs import Runs, at

CONFIG = {"data": {"eval": {"name": "rows"}}, "trainer": {"steps": 100, "eval_every": 10, "save_every": 40}}


def written(folder: Path, attempt: int, steps: range, seconds: float) -> None:
    """Appends lines of steps that took so many seconds, an evaluation of 8 each tenth and a checkpoint of 4 each
    fortieth."""
    at = 1000.0 * attempt
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {"step": step, "attempt": attempt, "perf/step_s": 0.9 * seconds}
            line |= {"perf/eval_s": 8.0} if step % 10 == 0 else {}
            line |= {"perf/save_s": 4.0} if step % 40 == 0 else {}
            at += seconds + line.get("perf/eval_s", 0.0) + line.get("perf/save_s", 0.0)
            file.write(json.dumps({**line, "time": at, "length/completion_mean": 9.0}) + "\n")


def test_steps_evaluations_and_checkpoints_to_come_are_counted(tmp_path: Path) -> None:
    written(tmp_path, 1, range(61), 2.0)
    left = Pace.of(tmp_path, CONFIG).seconds_left(60)
    assert left == pytest.approx(40 * 2.0 + 4 * 8.0 + 2 * 4.0)  # checkpoints after steps 80 and 100
    without = {"data": {"eval": None}, "trainer": CONFIG["trainer"]}
    assert Pace.of(tmp_path, without).seconds_left(60) == pytest.approx(40 * 2.0 + 2 * 4.0)


def test_a_run_that_goes_on_knows_its_pace_at_once_and_follows_another_machine(tmp_path: Path) -> None:
    written(tmp_path, 1, range(53), 2.0)
    pace = Pace.of(tmp_path, CONFIG)
    assert pace.seconds_left(40) == pytest.approx(60 * 2.0 + 6 * 8.0 + 2 * 4.0)  # steps 41 to 52 are undone
    written(tmp_path, 2, range(41, 46), 5.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines[-5:]:
        pace.note(line)
    assert pace.seconds_left(45) == pytest.approx(55 * 5.0 + 6 * 8.0 + 2 * 4.0)
    assert Pace.of(tmp_path, CONFIG).seconds_left(45) == pace.seconds_left(45)


def test_a_run_tells_the_time_that_is_left_in_its_lines_and_to_python(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    path, left = fake_runs.folder / "run", list[float | None]()
    with at("checkpoint.filled", 3, lambda: left.append(load_run(path).seconds_left)):
        assert fake_runs.train(fake_runs.config()) == 0
    lines = re.findall(r"^step [0-9]/4.*", capsys.readouterr().out, re.MULTILINE)
    assert [bool(re.search(r"  \d+ s left$", line)) for line in lines] == [False, True, True, True, False]
    assert left[0] is not None and 0 < left[0] < 60
    run = load_run(path)
    assert run.seconds_left is None  # it is over
    assert "perf/save_s" in run.metrics.steps[0]
