"""Alarms of runs: told once, the same after a kill and from the record, and a reason to stop if asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from mmrl.config.load import from_mapping
from mmrl.plugin_host import registry
from mmrl.plugin_host.installed import PluginInfo
from mmrl.rollout.records import read_lines, recorded_steps
from mmrl.runs.monitoring import monitors_of
from tests.faults.runs import Runs, at, events, outcome, records, steps

MONITORS = Path(__file__).parents[1] / "faults" / "loud.py"
LOUD = {"name": f"{MONITORS}:Loud"}


def config(runs: Runs, name: str = "run", monitors: Any = (LOUD,), **trainer: Any) -> Path:
    data = {"eval": {"name": "table", "path": str(runs.rows)}}
    return runs.config(name, data=data, trainer={"steps": 6, "eval_every": 2, **trainer}, monitors=list(monitors))


def alarms(run: Path) -> list[tuple[int, str, str, Any]]:
    """The alarms of events.jsonl."""
    return [(each["step"], each["monitor"], each["message"], each["values"]) for each in events(run, "alarm")]


def recorded(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[int, str, str, Any]]:
    """The alarms that ``mmrl monitor`` prints."""
    capsys.readouterr()
    assert main(["monitor", str(run), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)["alarms"]
    return [(each["step"], each["monitor"], each["message"], each["values"]) for each in found]


def test_an_alarm_is_an_event_and_a_line_and_its_numbers_are_metrics(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_runs.folder / "run"
    assert fake_runs.train(config(fake_runs)) == 0
    out = capsys.readouterr().out
    ((step, monitor, message, values),) = alarms(run)
    assert (step, monitor) == (3, "Loud") and message.startswith("it is loud, since step 2 (letters ")
    assert f"alarm: Loud, step 3: {message}" in out and message.endswith("): be quiet")
    lines = {line["step"]: line for line in records(run / "metrics.jsonl")}
    assert values["letters"] == sum(lines[i]["monitor/Loud/letters"] for i in (1, 2, 3)) / 3
    assert values["reward"] == sum(lines[i]["reward/mean"] for i in (1, 2, 3)) and values["evaluated"] == 16
    assert [step for step, line in lines.items() if "monitor/Loud/evaluated" in line] == [0, 2, 4, 6]
    assert all(line["perf/monitor_s"] >= 0 for line in lines.values())
    used = json.loads((run / "environment.json").read_text())["plugins"]
    assert [each["name"] for each in used if each["kind"] == "monitor"] == [LOUD["name"]]


@pytest.mark.parametrize(
    ("point", "count"),
    [("checkpoint.begin", 3), ("evaluations.renamed", 2), ("fake.update", 4), ("checkpoint.renamed", 4)],
)
def test_a_run_that_is_killed_tells_the_alarms_of_one_that_is_not(fake_runs: Runs, point: str, count: int) -> None:
    """Those of a step that is taken again may be there twice, and are the same."""
    monitors = [{"name": "all"}, LOUD | {"first": 3}]
    run, plain = fake_runs.folder / "run", fake_runs.folder / "plain"
    fake_runs.killed(config(fake_runs, monitors=monitors, save_every=2), point, count)
    assert fake_runs.train(config(fake_runs, monitors=monitors, save_every=2)) == 0
    assert fake_runs.train(config(fake_runs, "plain", monitors=monitors, save_every=2)) == 0
    assert outcome(run) == outcome(plain)  # with the numbers that were measured
    told = alarms(run)
    assert [each for place, each in enumerate(told) if each not in told[:place]] == alarms(plain)
    assert [(step, name) for step, name, *_ in alarms(plain)] == [(4, "Loud")]


def test_alarms_of_steps_that_are_done_are_not_told_again(fake_runs: Runs) -> None:
    with at("fake.generate", 9, lambda: (_ for _ in ()).throw(RuntimeError("boom"))):
        assert fake_runs.train(config(fake_runs, save_every=1)) == 1
    assert len(alarms(fake_runs.folder / "run")) == 1
    assert fake_runs.train(config(fake_runs, save_every=1)) == 0
    assert len(alarms(fake_runs.folder / "run")) == 1


def test_the_record_gives_the_same_alarms_in_both_schemas_and_without_rollouts(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_runs.folder / "run"
    assert fake_runs.train(config(fake_runs, monitors=[{"name": "all"}, LOUD])) == 0
    live = alarms(run)
    assert len(live) == 1 and recorded(run, capsys) == live
    for step, file in recorded_steps(run).items():
        lines = [json.dumps(record) + "\n" for record in read_lines(file)]
        (run / "rollouts" / f"step-{step:06d}.jsonl").write_text("".join(lines))
        file.unlink()
    assert {file.suffix for file in recorded_steps(run).values()} == {".jsonl"} and recorded(run, capsys) == live
    for folder in ("rollouts", "evaluations"):
        for file in (run / folder).iterdir():
            file.unlink()
    assert recorded(run, capsys) == live


def test_thresholds_are_tried_on_a_record(fake_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_runs.folder / "run"
    assert fake_runs.train(config(fake_runs)) == 0
    assert [step for step, *_ in recorded(run, capsys, "--set", "Loud.first=4", "Loud.hits=1")] == [4]
    assert recorded(run, capsys, "--set", "Loud.off=true") == []
    assert main(["monitor", str(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step 3  Loud: it is loud, since step 2") and out[1] == "1 alarm in 6 steps, of Loud"
    for words, message in {
        ("Loud.second=4",): "second",
        ("Laud.first=4",): "no installed package has a monitor plugin called 'Laud'",
        ("first=4",): "first is no option of a monitor",
    }.items():
        assert main(["monitor", str(run), "--set", *words]) in (2, 4)
        assert message in capsys.readouterr().err
    assert main(["monitor", str(fake_runs.folder / "none")]) == 2


def test_a_run_without_monitors_is_shown_to_all_of_them(fake_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake_runs.train(config(fake_runs, monitors=[])) == 0
    run = fake_runs.folder / "run"
    names = {name for line in records(run / "metrics.jsonl") for name in line}
    assert not any("monitor" in name for name in names)
    capsys.readouterr()
    assert main(["monitor", str(run), "--json"]) == 0
    assert "dead_groups" in json.loads(capsys.readouterr().out)["monitors"]


def test_an_alarm_stops_a_run_that_asks_for_it_and_the_same_command_goes_on(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    stops, run = config(fake_runs, save_every=0, on_alarm="stop"), fake_runs.folder / "run"
    assert fake_runs.train(stops) == 6
    error = capsys.readouterr().err
    assert "the run ends after step 3, which has a checkpoint: Loud: it is loud" in error
    assert "trainer.on_alarm: warn ends no run" in error and "Traceback" not in error
    assert steps(run)[-1] == "step-000003" and records(run / "metrics.jsonl")[-1]["step"] == 3
    assert fake_runs.train(stops) == 0
    assert fake_runs.train(config(fake_runs, "plain", save_every=0)) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")
    assert alarms(run) == alarms(fake_runs.folder / "plain")


def test_an_alarm_of_an_evaluation_that_was_interrupted_stops_the_run_too(fake_runs: Runs) -> None:
    """The checkpoint of the step is there, and it is judged when the run goes on."""
    stops = config(fake_runs, monitors=[LOUD | {"first": 4, "hits": 1}], save_every=1, on_alarm="stop")
    fake_runs.killed(stops, "evaluations.begin", 3)
    assert fake_runs.train(stops) == 6
    assert [step for step, *_ in alarms(fake_runs.folder / "run")] == [4]
    assert fake_runs.train(stops) == 0


def test_a_monitor_that_raises_is_told_once_and_left_out(fake_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    broken, run = {"name": f"{MONITORS}:Broken"}, fake_runs.folder / "run"
    assert fake_runs.train(config(fake_runs, monitors=[broken, LOUD])) == 0
    (event,) = events(run, "monitor")
    assert event["message"].startswith("monitor Broken is left out:") and "RuntimeError: no more" in event["message"]
    assert "Traceback" in event["details"] and event["message"] in capsys.readouterr().out
    assert [step for step, *_ in alarms(run)] == [3]
    assert main(["monitor", str(run)]) == 0
    assert "warning: monitor Broken is left out" in capsys.readouterr().err


def test_all_means_every_installed_one_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = list[tuple[str, str]]()

    def found(monitors: Any) -> dict[str, Any]:
        base = {"model": {"path": "m"}, "data": {"train": {"name": "t"}}, "algorithm": {"name": "a"}}
        made = monitors_of(
            from_mapping({**base, "monitors": monitors}), lambda label, error: faults.append((label, str(error)))
        )
        return {name: monitor.config.model_dump() for name, monitor in made.items()}

    every = found("all")
    assert {"dead_groups", "wild_gradient"} <= set(every) and found([]) == {}
    some = found([{"name": "dead_groups", "steps": 3}, {"name": "all"}, {"name": "wild_gradient", "off": True}])
    assert set(some) == set(every) - {"wild_gradient"} and some["dead_groups"]["steps"] == 3
    assert set(found([{"name": "mmrl-train:dead_groups"}])) == {"dead_groups"}
    assert set(found([{"name": "mmrl-train:dead_groups", "off": True}, {"name": "all"}])) == set(every) - {
        "dead_groups"
    }
    assert faults == []
    absent = PluginInfo("monitor", "absent", "theirs", "1.0", "nowhere:Absent")
    installed = registry.list_plugins()
    monkeypatch.setattr(registry, "list_plugins", lambda: [absent, *installed])
    assert set(found("all")) == set(every)
    ((label, error),) = faults
    assert label == "absent" and "theirs:absent" in error


@pytest.mark.parametrize(
    ("monitors", "message"),
    [
        ([{"name": "dead_grups"}], "dead_groups"),
        ([{"name": "dead_groups", "step": 3}], "step"),
        ([{"name": "dead_groups"}, {"name": "mmrl-train:dead_groups"}], "two monitors are called 'dead_groups'"),
        ([{"name": "all", "steps": 3}], "'all' stands for other monitors, and has no options"),
    ],
)
def test_monitors_that_cannot_be_are_refused(
    fake_runs: Runs, capsys: pytest.CaptureFixture[str], monitors: list[dict[str, Any]], message: str
) -> None:
    assert fake_runs.train(config(fake_runs, monitors=monitors)) in (2, 4)
    assert message in capsys.readouterr().err
