"""Runs that are damaged, strange or unfinished: a sentence in place of what cannot be read, and the rest as it is."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.viewer.documents import NotThere
from mmrl.viewer.pages import Pages
from mmrl.viewer.report import make_report
from tests.viewer.made_run import make_run

RESOURCES = ("", "/metrics", "/events", "/ledger", "/evaluations", "/step/1", "/step/1/group/0", "/step/2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def asked(run: Path, part: str) -> Any:
    """The document, which JSON can hold."""
    found = Pages([run]).document(f"run/0{part}")
    json.dumps(found, allow_nan=False)
    return found


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def fill(file: Path) -> None:
    file.write_bytes(b"\x00\xff" * 500)


def spoil_line(file: Path) -> None:
    """Damage the second line."""
    first, _, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([first, b'{"step": 1, "time\xff": nul}\n', *others]))


@pytest.mark.parametrize(
    ("damage", "name", "part", "said"),
    [
        (cut, "rollouts/step-000001.parquet", "/step/1", "no record of a rollout"),
        (fill, "rollouts/step-000001.parquet", "/step/1", "no record of a rollout"),
        (fill, "rollouts/step-000001.parquet", "/step/1/group/0", "no record of a rollout"),
        (cut, "evaluations/step-000002.parquet", "/evaluation/2", "no record of a rollout"),
        (fill, "evaluations/blank-000002.parquet", "/evaluations", "no record of a rollout"),
        (spoil_line, "metrics.jsonl", "", "line 2 of metrics.jsonl cannot be read and is left out"),
        (spoil_line, "metrics.jsonl", "/metrics", "line 2 of metrics.jsonl cannot be read and is left out"),
        (spoil_line, "events.jsonl", "", "line 2 of events.jsonl cannot be read and is left out"),
        (spoil_line, "attempts.jsonl", "", "line 2 of attempts.jsonl cannot be read and is left out"),
        (spoil_line, "ledger.jsonl", "/ledger", "a line of the run's history is no JSON"),
        (fill, "config.yaml", "", "config.yaml"),
        (fill, "environment.json", "", "environment.json cannot be read"),
        (fill, "origins.json", "", "origins.json cannot be read"),
    ],
)
def test_a_damaged_file_is_a_sentence(
    damage: Callable[[Path], None], name: str, part: str, said: str, run: Path, made: Path
) -> None:
    damage(run / name)
    problem = asked(run, part)["problem"]
    assert said in problem and "Traceback" not in problem
    others = [each for each in RESOURCES if each not in ("", part) and not each.startswith(part or "?")]
    before, now = (Pages([each]) for each in (made, run))
    depends = {"metrics.jsonl": ["/metrics"], "events.jsonl": ["/events"], "attempts.jsonl": ["/metrics"]}
    depends |= {"evaluations/step-000002.parquet": ["/evaluations"]}
    depends |= {"config.yaml": ["/step/1", "/step/2", "/evaluations"], "rollouts/step-000001.parquet": ["/step/1"]}
    for each in others:
        if each not in depends.get(name, []):
            assert now.document(f"run/0{each}") == before.document(f"run/0{each}"), each
    make_report(run).html()


def test_a_damaged_line_hides_no_other(run: Path) -> None:
    spoil_line(run / "metrics.jsonl")  # step 1; the attempt that went on from it took step 2 again
    assert asked(run, "/metrics")["steps"] == [0, 2]
    spoil_line(run / "events.jsonl")
    assert [each["kind"] for each in asked(run, "/events")] == ["dropped", "alarm", "alarm"]
    (run / "events.jsonl").write_text('[1]\n"text"\n{"kind": "no time"}\nnull\n')
    assert asked(run, "/events") == []
    assert "4 lines of events.jsonl cannot be read and are left out; the first one is 1" in asked(run, "")["problem"]


@pytest.mark.parametrize("name", ["events.jsonl", "attempts.jsonl", "ledger.jsonl", "config.yaml", "environment.json"])
def test_a_missing_file_is_no_problem(name: str, run: Path) -> None:
    (run / name).unlink()
    assert asked(run, "")["problem"] is None
    for part in RESOURCES[1:]:
        assert "problem" not in asked(run, part) or part == "/metrics"


def test_values_of_another_kind_than_a_run_writes_are_a_sentence(run: Path) -> None:
    for name, record in {
        "attempts.jsonl": {"attempt": [1], "time": "x", "resumed_from": {}},
        "metrics.jsonl": {"step": [1], "a": {}},
        "ledger.jsonl": {"step": 1},
    }.items():
        (run / name).write_text(json.dumps(record) + "\n")
    for part in ("", "/metrics", "/ledger"):
        assert re.search("this part of the run cannot be understood: (Type|Key)Error", asked(run, part)["problem"]), (
            part
        )


def test_a_strange_config_spoils_no_step(run: Path) -> None:
    (run / "origins.json").write_text("[1]")
    (run / "config.yaml").write_text("algorithm: 7\nrewards: [7]\ntrainer: text\nmodel: [1]\n")
    found = asked(run, "")
    assert found["algorithm"] is None and found["problem"] == "origins.json holds no object"
    assert found["config"] == {"algorithm": 7, "rewards.0": 7, "trainer": "text", "model.0": 1}
    assert len(asked(run, "/step/1")["groups"]) == 5 and len(asked(run, "/step/1/group/0")["members"]) == 5


def test_damaged_evaluations_and_steps_hide_no_others(run: Path) -> None:
    fill(run / "evaluations" / "step-000000.parquet")
    found = asked(run, "/evaluations")
    assert "step-000000.parquet" in found["problem"]
    assert found["prompts"][0] == {
        "prompt_id": "shapes/0",
        "answer": "red",
        "results": {"2": 1.0},
        "blank": {"0": 0.5, "2": 0.5},
    }
    fill(run / "rollouts" / "step-000001.parquet")
    occurrences = Pages([run]).document("run/0/prompt", {"id": "shapes/0"})
    assert [(each["kind"], each["step"]) for each in occurrences] == [
        ("step", 2), ("evaluation", 2), ("blank", 0), ("blank", 2)
    ]  # fmt: skip


def test_a_run_that_has_only_begun_is_shown(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "time": 5.0, "resumed_from": null}\n')
    found = asked(tmp_path, "")
    assert found["steps"] == [] and found["problem"] is None and found["last_step"] == 0 and found["config"] == {}
    assert asked(tmp_path, "/metrics")["curves"] == {} and asked(tmp_path, "/events") == []
    assert asked(tmp_path, "/evaluations")["prompts"] == []
    make_report(tmp_path).html()


def test_a_run_that_goes_away_while_it_is_shown_is_a_sentence(run: Path) -> None:
    pages = Pages([run])
    pages.document("run/0")
    shutil.rmtree(run)
    assert "there is no run" in pages.document("run/0")["problem"]
    with pytest.raises(NotThere):
        pages.document("run/0/step/1")


def test_no_damage_to_a_rollouts_file_is_more_than_a_sentence(run: Path, made: Path) -> None:
    """Bytes changed at random: the documents are as before, or a sentence."""
    whole = (made / "rollouts" / "step-000001.parquet").read_bytes()
    rng, sentences = random.Random(22), 0
    expected = {part: asked(made, part) for part in ("/step/1", "/step/1/group/1")}
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 3, 40])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (run / "rollouts" / "step-000001.parquet").write_bytes(data)
        for part, before in expected.items():
            found = asked(run, part)
            sentences += set(found) == {"problem"}
            assert set(found) == {"problem"} or found == before or part == "/step/1/group/1"
    assert sentences > 60
