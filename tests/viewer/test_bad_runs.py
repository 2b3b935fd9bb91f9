"""Runs that are damaged, strange or unfinished: a sentence in place of what cannot be read, and the rest as it is."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.viewer.contained import read_records
from mmrl.viewer.documents import NotThere
from mmrl.viewer.pages import Pages
from mmrl.viewer.report import make_report
from tests.rollout.test_records import SCHEMA_1
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
    make_report([run]).html()


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
    (run / "ledger.jsonl").write_text('{"step": 1}\n')
    assert "this part of the run cannot be understood: KeyError" in asked(run, "/ledger")["problem"]


DEEP, RATHER_DEEP, HUGE = "[" * 100_000 + "]" * 100_000, "[" * 70 + "]" * 70, "9" * 400
ODD_LINES = {
    "metrics.jsonl": (
        *('{"step": "a"}', '{"step": [1], "a": {}}', '{"step": 3, "a": "text"}', '{"step": 3, "attempt": null}'),
        f'{{"step": 3, "a": {HUGE}}}',
    ),
    "attempts.jsonl": (
        *('{"attempt": [1], "time": 5}', '{"attempt": 3, "time": 5, "folder": [1]}'),
        *('{"attempt": 3, "time": 5, "resumed_from": {}}', '{"attempt": 3, "time": 5, "changes": [1]}'),
    ),
    "events.jsonl": ('{"time": "x", "kind": "alarm"}', '{"time": 5, "kind": []}', f'{{"time": {HUGE}, "kind": "x"}}'),
}
STRANGE = ("[1]", DEEP, f'{{"step": 3, "a": {DEEP}}}', f'{{"time": 5, "kind": "x", "values": {RATHER_DEEP}}}')


@pytest.mark.parametrize("name", ODD_LINES)
def test_a_line_of_another_form_hides_no_other(name: str, run: Path, made: Path) -> None:
    lines = [*ODD_LINES[name], *STRANGE]
    with (run / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    said = f"{len(lines)} lines of {name} cannot be read and are left out"
    assert said in asked(run, "")["problem"]
    for part in RESOURCES:
        before, now = (Pages([each]).document(f"run/0{part}") for each in (made, run))
        for each in (before, now):
            [each.pop(key, None) for key in ("problem", "path") if isinstance(each, dict)]
        assert now == before, part


@pytest.mark.parametrize("text", [f'{{"a": {DEEP}}}', f'{{"a": {RATHER_DEEP}}}', DEEP], ids=["deep", "rather", "list"])
def test_an_environment_that_is_nested_deeply_is_left_out(text: str, run: Path) -> None:
    (run / "environment.json").write_text(text)
    found = asked(run, "")
    assert found["environment"] == {} and "environment.json cannot be read: it is nested too deeply" in found["problem"]
    assert found["last_step"] == 2


def test_numbers_that_a_browser_takes_for_infinity_are_texts(run: Path) -> None:
    (run / "environment.json").write_text(f'{{"cpus": {HUGE}, "few": [1, {HUGE}]}}')
    with (run / "events.jsonl").open("a") as file:
        file.write(f'{{"time": 5, "kind": "x", "step": {HUGE}}}\n')
    assert asked(run, "")["environment"] == {"cpus": hex(int(HUGE)), "few": [1, hex(int(HUGE))]}
    assert asked(run, "/events")[-1]["step"] == hex(int(HUGE))


@pytest.mark.parametrize("error", [RecursionError, MemoryError, OverflowError, ZeroDivisionError, RuntimeError])
def test_no_error_of_a_document_is_more_than_a_sentence(
    error: type[Exception], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error("at once")

    monkeypatch.setattr("mmrl.viewer.pages.ViewedRun.lines", fail)
    assert asked(run, "") == {"problem": f"this part of the run cannot be understood: {error.__name__}: at once"}


def test_rollouts_that_are_nested_deeply_hide_no_others(run: Path) -> None:
    (run / "rollouts" / "step-000001.parquet").unlink()
    (run / "rollouts" / "step-000001.jsonl").write_text(DEEP + "\n")
    (run / "evaluations" / "step-000000.parquet").unlink()
    (run / "evaluations" / "step-000000.jsonl").write_text(DEEP + "\n")
    assert "no record of a rollout: RecursionError" in asked(run, "/step/1")["problem"]
    assert asked(run, "/evaluations")["prompts"][0]["results"] == {"2": 1.0}
    assert len(Pages([run]).document("run/0/prompt", {"id": "shapes/0"})) == 4


def test_a_group_that_no_address_can_name_is_a_sentence_in_a_report(run: Path) -> None:
    (run / "rollouts" / "step-000001.parquet").unlink()
    lines = [json.loads(line) | {"group": -1} for line in SCHEMA_1.read_text().splitlines()]
    (run / "rollouts" / "step-000001.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "there is no such document" in make_report([run]).documents["run/0/step/1/group/-1"]["problem"]


def test_there_are_no_more_metrics_than_a_page_can_show(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in (3, 4):
            names = [f"some/{n}" for n in range(5000) if step == 3 or n % 5 == 0]
            file.write(json.dumps({"step": step, "attempt": 2, "time": 5, **dict.fromkeys(names, 0.5)}) + "\n")
    found = asked(run, "/metrics")
    assert len(found["curves"]) == 2000 and {f"some/{n}" for n in range(0, 5000, 5)} <= found["curves"].keys()
    assert "reward/mean" in found["curves"]
    assert "metrics.jsonl has 5011 metrics: the 2000 that most steps have are shown" in found["problem"]


# ---- Files that are no files of the run


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A private file beside the run, which every reader would take."""
    file = tmp_path / "secret"
    file.write_text('{"step": 1, "attempt": 1, "time": 5, "kind": "alarm", "told": "hunter22"}\n')
    return file


SMALL = (
    "metrics.jsonl",
    "attempts.jsonl",
    "events.jsonl",
    "ledger.jsonl",
    "config.yaml",
    "environment.json",
    "origins.json",
)


def test_links_that_lead_out_of_the_run_are_not_followed(run: Path, secret: Path) -> None:
    for name in SMALL:
        (run / name).unlink()
        (run / name).symlink_to(secret)
    documents = [asked(run, part) for part in RESOURCES]
    assert "hunter22" not in json.dumps(documents) and "hunter22" not in make_report([run]).html()
    for name in SMALL:
        said = f"{name} is a link that leads out of the run's folder, and is not read"
        assert said in documents[3 if name == "ledger.jsonl" else 0]["problem"], name


def test_links_within_a_run_and_to_a_run_are_followed(run: Path, made: Path) -> None:
    for name in SMALL:
        (run / name).rename(run / f"moved-{name}")
        (run / name).symlink_to(f"moved-{name}")
    (run.parent / "link").symlink_to(run)
    for part in RESOURCES[:4]:
        before, now = (Pages([each]).document(f"run/0{part}") for each in (made, run.parent / "link"))
        for each in (before, now):
            [each.pop(key, None) for key in ("name", "path") if isinstance(each, dict)]
        assert now == before, part


def test_rollouts_of_another_folder_are_shown_but_not_sent(run: Path, tmp_path: Path) -> None:
    for name in ("rollouts", "evaluations"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    assert len(asked(run, "/step/1")["groups"]) == 5
    report = make_report([run])
    said = "step-000001.parquet is a link that leads out of the run's folder, and is not read"
    assert report.documents["run/0/step/1"] == {"problem": said}
    assert report.documents["run/0/evaluations"]["prompts"] == [] and "the circle" not in report.html()


def test_a_sentence_of_a_report_does_not_tell_where_the_folder_is(run: Path) -> None:
    fill(run / "rollouts" / "step-000001.parquet")
    fill(run / "evaluations" / "step-000000.parquet")
    (run / "config.yaml").write_text("]")
    said = make_report([run]).html()
    assert str(run.parent) not in said and "run/rollouts/step-000001.parquet" in said and "run/config.yaml" in said


def test_pipes_are_not_waited_for(run: Path) -> None:
    pipes = (*SMALL, ".lock", "rollouts/step-000001.parquet", "evaluations/step-000002.parquet")
    for name in pipes:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    found = asked(run, "")
    assert not found["live"] and "ledger.jsonl is no regular file" in asked(run, "/ledger")["problem"]
    assert all(f"{name} is no regular file" in found["problem"] for name in SMALL if name != "ledger.jsonl")
    assert all("no regular file" in asked(run, part)["problem"] for part in ("/step/1", "/evaluations"))
    make_report([run]).html()


def test_devices_and_huge_files_are_not_read(run: Path) -> None:
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to("/dev/zero")
    for name in ("environment.json", "origins.json", "attempts.jsonl", "media/" + "a" * 64 + ".png"):
        (run / name).unlink(missing_ok=True)
        with (run / name).open("wb") as file:
            file.truncate(2**36)  # with no block on the disk
    (run / "attempts.jsonl").write_bytes(b"\0" * (2**24 + 100) + b'\n{"attempt": 7, "time": 5}\n')
    found = asked(run, "")
    for said in (
        "events.jsonl is a link",
        "environment.json is larger than",
        "line 1 of attempts.jsonl cannot be read",
    ):
        assert said in found["problem"]
    assert [each["number"] for each in found["attempts"]] == [7]
    with pytest.raises(NotThere):
        Pages([run]).runs[0].image("a" * 64)


def test_keys_that_hold_secrets_are_shown_without_them(run: Path) -> None:
    secrets = ["hunter2one", "hunter2two", "hunter2three", "hunter2four", "hunter2five", "hunter2six", "31337"]
    with (run / "config.yaml").open("a") as file:
        file.write(f"judge: {{api_key: {secrets[0]}, password: {secrets[6]}, url: 'http://here', token: null}}\n")
    environment = {"server": {"hub_token": secrets[1], "name": "here", "keys": [{"secret": {"a": [secrets[2]]}}]}}
    (run / "environment.json").write_text(json.dumps(environment))
    changes = [
        f"judge.api_key: {secrets[3]} -> null", f"judge: {{name: one, api_key: '{secrets[4]}'}} -> {{name: two}}",
        "learner.lr: 0.01 -> 0.001",
    ]  # fmt: skip
    line = {"attempt": 3, "time": 5.0, "resumed_from": 2, "changes": changes}
    with (run / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    origins = {"judge.api_key": f"override judge.api_key={secrets[5]}", "judge.url": "a.yaml:3"}
    (run / "origins.json").write_text(json.dumps(origins))
    found = asked(run, "")
    assert not [secret for secret in secrets if secret in json.dumps(found)]
    assert found["config"]["judge.api_key"] == found["config"]["judge.password"] == "[redacted]"
    assert found["config"]["judge.url"] == "http://here" and found["config"]["judge.token"] is None
    assert found["environment"]["server"] == {
        "hub_token": "[redacted]", "name": "here", "keys": [{"secret": "[redacted]"}]
    }  # fmt: skip
    assert found["attempts"][-1]["changes"] == [
        "judge.api_key: [redacted]", "judge: {name: one, api_key: [redacted]} -> {name: two}", changes[2],
    ]  # fmt: skip
    assert found["origins"] == {"judge.api_key": "override judge.api_key=[redacted]", "judge.url": "a.yaml:3"}


def test_lines_that_are_no_records_are_told_and_hide_no_others(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert read_records(tmp_path, file) == ([], "")
    file.write_bytes(b'{"step": 1, "a": 2}\n{"step": 2}\n{"step": 3')
    assert read_records(tmp_path, file) == ([{"step": 1, "a": 2}, {"step": 2}], "")
    said = "line 2 of lines.jsonl cannot be read and is left out"
    assert read_records(tmp_path, file, lambda record: "a" in record) == ([{"step": 1, "a": 2}], said)
    file.write_bytes(b'{"step": 1}\n\xff\n[1]\n\n{"step": 2}\n')
    found, said = read_records(tmp_path, file)
    assert found == [{"step": 1}, {"step": 2}]
    assert said == "3 lines of lines.jsonl cannot be read and are left out; the first one is 2"


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
    make_report([tmp_path]).html()


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
