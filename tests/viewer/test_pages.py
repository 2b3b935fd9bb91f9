"""The documents of a run that was made by hand: what the page gets, number by number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.runs.directory import RunDirectory
from mmrl.viewer.documents import NotThere
from mmrl.viewer.pages import Pages
from mmrl.viewer.steps import why
from tests.rollout.test_records import SCHEMA_1
from tests.viewer.made_run import HOSTILE, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def pages(run: Path) -> Pages:
    return Pages([run])


def plain(pages: Pages, resource: str, **query: str) -> Any:
    """The document as the page reads it: JSON without NaN."""
    return json.loads(json.dumps(pages.document(resource, query), allow_nan=False))


def test_runs_in_folders_of_one_name_are_told_apart_by_their_paths(run: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name / "grpo" for name in ("first", "second")]
    for path in paths:
        path.parent.mkdir()
        path.symlink_to(run)
    names = [each["name"] for each in plain(Pages([*paths, paths[0]]), "runs")]
    assert names == ["first/grpo", "second/grpo", "first/grpo"]
    assert [each["name"] for each in plain(Pages([paths[0], run]), "runs")] == ["grpo", "run"]


def test_a_run_at_a_glance(pages: Pages, run: Path) -> None:
    assert plain(pages, "runs") == [{"run": 0, "name": "run", "path": str(run), "problem": None}]
    found = plain(pages, "run/0")
    assert (found["live"], found["problem"], found["last_step"], found["tokens"]) == (False, None, 2, None)
    assert (found["steps"], found["evaluations"], found["blanks"], found["checkpoints"]) == (
        [1, 2],
        [0, 2],
        [0, 2],
        [1],
    )
    assert (found["algorithm"], found["accuracy"]) == ("dapo", "exact")
    assert found["config"]["learner.lr"] == 0.001 and found["config"]["rewards.1.weight"] == 0.2
    assert found["origins"]["sampler.group_size"] == "examples/shapes.yaml:14"
    assert found["environment"]["engine"] == {"device_name": "CPU"}
    first, second = found["attempts"]
    assert (first["number"], first["from_step"], first["exit"]) == (1, None, 10)
    assert first["message"] == "stopped by SIGTERM" and first["changes"] == [] and first["begin"] <= first["end"]
    assert (second["number"], second["from_step"], second["exit"], second["message"]) == (2, 1, 0, "")
    assert second["changes"] == ["learner.lr: 0.01 -> 0.001"]


def test_curves_are_of_the_steps_that_count_and_nan_is_null(pages: Pages) -> None:
    found = plain(pages, "run/0/metrics")
    assert found["steps"] == [0, 1, 2] and found["problem"] is None
    assert found["curves"]["eval/accuracy"] == [0.25, None, 0.75]  # the first attempt had 0.5 at step 2
    assert found["curves"]["policy/entropy"] == [None, 0.5, None]
    assert found["curves"]["reward/mean"] == [None, 0.4, 0.5]


def test_events_and_ledger(pages: Pages) -> None:
    events = plain(pages, "run/0/events")
    assert [each["kind"] for each in events] == ["dropped", "resumed", "alarm", "alarm"]
    assert events[-1]["monitor"] == "length" and events[-1]["values"] == {"correlation": 0.71, "limit": 0.5}
    ledger = plain(pages, "run/0/ledger")
    assert ledger == [{"step": 1 + n // 2, "update": n + 1, "samples": 12} for n in range(4)]


def test_a_steps_table_has_a_column_entry_for_each_rollout(pages: Pages) -> None:
    found = plain(pages, "run/0/step/1")
    rows = found["rows"]
    assert {len(column) for column in rows.values()} == {20}
    assert rows["group"] == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 3 + [4] * 4
    assert rows["greedy"] == [False] * 4 + [True] + [False] * 15
    assert rows["reward"][:5] == [1.2, 0.0, 1.2, 1.0, 0.0] and rows["reward"][13:16] == [1.0, -0.1, 0.0]
    assert rows["right"][:5] == [True, False, True, True, False] and rows["right"][13:16] == [None] * 3
    assert rows["turns"][13:16] == [3, 2, 1] and rows["turns"][0] == 1
    assert rows["finish_reason"][13:16] == ["environment", "turns", "failed"]
    assert [rows["truncated"][i] for i in (0, 5, 14)] == [False, True, True]
    assert rows["valid"][13:16] == [True, True, False]
    assert (
        rows["length"][0] == 5 and rows["length"][13] == 60
    )  # five tokens; three turns of 20, and not what came between
    assert rows["text"][6] == "" and rows["text"][7] == ("red " * 40)[:200] and rows["text"][5] == HOSTILE
    cut = found["groups"][1]["prompt"]
    assert len(cut) == 201 and cut.endswith("…") and "</script>" in cut
    assert found["groups"][2]["question"] == "<image>What colour is shape 2?", "the user's message, without marks"


def test_a_steps_groups_say_why_they_were_kept_or_dropped(pages: Pages) -> None:
    groups = plain(pages, "run/0/step/2")["groups"]
    assert [each["prompt_id"] for each in groups] == [f"shapes/{n}" for n in (0, 1, 2, 4, 3)]
    assert [(each["kept"], each["trained"], each["epoch"]) for each in groups] == [(True, True, 1)] * 4 + [
        (False, False, 1)
    ]
    assert groups[0]["reward_mean"] == pytest.approx(0.85)  # of 1.2, 0, 1.2 and 1; the greedy one does not count
    assert groups[3]["reward_mean"] == pytest.approx(0.45)  # the one that failed does not count
    assert groups[0]["why"] == "Trained on."
    assert "all 4 valid rewards are 0" in groups[2]["why"] and "no signal" in groups[2]["why"]
    assert "rejected" in groups[4]["why"] and "all 4 valid rewards are 1" in groups[4]["why"]
    assert [(each["width"], each["height"]) for each in groups[0]["images"]] == [(56, 56), (84, 56)]
    assert groups[1]["source"] == "odd" and groups[1]["answer"] == "blue"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evaluation", True, False, [1.0]), "trains on nothing"),
        (("step", True, True, []), "No rollout of it could be scored"),
        (("step", False, False, [0.0, 1.0]), "rejected it: its rewards differ"),
        (("step", True, False, [0.0, 1.0]), "was kept, but"),
        (("step", True, True, [0.5, 0.5]), "all 2 valid rewards are 0.5"),
        (("step", True, True, [0.0], True), "The dataset's own; trained on."),
        (("step", True, False, [0.0], True), "The dataset's own; the step did not end."),
    ],
)
def test_the_reason_of_a_groups_fate(arguments: Any, said: str) -> None:
    assert said in why(*arguments)


def test_a_group_has_its_prompt_and_each_member(pages: Pages) -> None:
    found = plain(pages, "run/0/step/1/group/0")
    assert found["messages"][0] == {"role": "system", "content": "Answer in one word."}
    assert found["prompt"].startswith("<|im_start|>user\n<|vision_start|>") and found["columns"]["difficulty"] == 0
    assert [each["index"] for each in found["members"]] == [0, 1, 2, 3, 0] and found["members"][4]["greedy"]
    second = found["members"][1]
    assert second["answers"] == {"exact": "blue."} and second["rewards"] == {"exact": 0.0, "format": 0.0}
    assert second["failure"] is None and "episode" not in second and second["weight_version"] == 0


def test_tokens_have_exact_numbers_and_pieces_of_text(pages: Pages) -> None:
    tokens = plain(pages, "run/0/step/2/group/0")["members"][0]["tokens"]
    assert tokens["text"] == ["the", " circle", " is", " red", "<|im_end|>"] and tokens["mask"] == [True] * 5
    assert tokens["advantage"] == [0.35] * 5  # 1.2 less the mean 0.85
    sampler = np.linspace(0.01, 2.5, 5)
    assert tokens["sampler_logprob"] == pytest.approx(-sampler, rel=1e-5)
    assert tokens["learner_logprob"] == pytest.approx(0.02 - sampler, rel=1e-4)
    assert tokens["reference_logprob"] == pytest.approx(0.02 - 0.2 - sampler, rel=1e-4)
    assert tokens["gap"] == pytest.approx([-0.02] * 5, rel=1e-4)
    assert tokens["ratio"] == pytest.approx([1.10517] * 5)  # exp(0.1): the second optimizer step began 0.1 higher
    assert tokens["entropy"] == pytest.approx([0.2, 0.5, 0.8, 1.1, 1.4])
    assert "value" not in tokens
    greedy = plain(pages, "run/0/step/2/group/0")["members"][4]["tokens"]
    assert set(greedy) == {"text", "ids", "mask", "sampler_logprob"}


def test_a_character_of_several_tokens_is_at_its_last_one(pages: Pages) -> None:
    pieces = plain(pages, "run/0/step/1/group/0")["members"][2]["tokens"]["text"]
    assert [piece for piece in pieces if not piece.startswith("\\x")] == ["数", "学", " ", "🙂", " red", "<|im_end|>"]
    hidden = [piece for piece in pieces if piece.startswith("\\x")]
    assert hidden[:2] == ["\\xE6", "\\x95"] and len(hidden) == 7


def test_an_episode_has_turns_observations_and_no_numbers_where_the_policy_did_not_write(pages: Pages) -> None:
    members = plain(pages, "run/0/step/1/group/3")["members"]
    won, lost, failed = members
    assert won["turn_rewards"] == [0.0, 0.0, 1.0] and won["components"] == {"goal": 1.0, "steps": None}
    first = won["episode"][0]
    assert first["text"] == "I go right, turn 0." and first["calls"][0]["arguments"]["steps"] == [0, HOSTILE]
    assert [set(part) for part in first["content"]] == [{"text"}, {"image"}, {"text"}]
    assert lost["episode"][0]["calls"][0] == {"name": "", "arguments": None, "error": "this is no JSON: {'to'"}
    mask, values = won["tokens"]["mask"], won["tokens"]
    assert mask.count(False) == 2 * 22
    for name in ("advantage", "sampler_logprob", "learner_logprob", "entropy", "ratio", "gap"):
        assert [value is None for value in values[name]] == [not each for each in mask], name
    assert failed["failure"] == "reset: TimeoutError: the world did not answer in 5 s"
    assert failed["tokens"]["ids"] == [] and failed["valid"] is False and failed["rewards"] == {"environment": None}


def test_search_reads_completions_prompts_and_turns(pages: Pages) -> None:
    def rows(query: str) -> list[int]:
        found: list[int] = plain(pages, "run/0/step/1/search", q=query)["rows"]
        return found

    assert rows("LOOK AT THE SQUARE") == [1]
    assert rows("walk to the goal") == [13, 14, 15]  # the prompt of three episodes
    assert rows("turn 0.") == [13, 14]  # a turn before the last
    assert rows("you see") == [13, 14]  # an observation
    assert rows("no such words") == []
    assert rows("Answer in one word") == list(range(20))


def test_a_prompt_is_followed_over_steps_and_evaluations(pages: Pages) -> None:
    found = plain(pages, "run/0/prompt", id="shapes/0")
    places = [(each["kind"], each["step"], each["group"], each["epoch"]) for each in found]
    assert places[:2] == [("step", 1, 0, 0), ("step", 2, 0, 1)]
    assert places[2:] == [(kind, step, 0, 0) for kind in ("evaluation", "blank") for step in (0, 2)]
    assert [each["right"] for each in found[0]["members"]] == [True, False, True, True, False]
    assert all(
        each["question"] == "<image><image>What colour is shape 0?" and len(each["images"]) == 2 for each in found
    )
    assert [each["kind"] for each in plain(pages, "run/0/prompt", id="shapes/4")] == ["step", "step"]


def test_evaluations_have_each_prompts_result(pages: Pages) -> None:
    found = plain(pages, "run/0/evaluations")
    assert found["steps"] == found["blanks"] == [0, 2]
    results = {each["prompt_id"]: (each["results"], each["blank"]) for each in found["prompts"]}
    assert results["shapes/0"] == ({"0": 1.0, "2": 1.0}, {"0": 0.5, "2": 0.5})
    assert results["shapes/2"] == ({"0": 0.0, "2": 1.0}, {"0": 0.0, "2": 0.0})
    groups = plain(pages, "run/0/evaluation/2")["groups"]
    assert len(groups) == 3 and groups[0]["why"] == "An evaluation trains on nothing."
    assert plain(pages, "run/0/blank/0/group/1")["prompt_id"] == "shapes/1"


@pytest.mark.parametrize(
    "resource",
    ["", "run", "run/1", "run/x", "run/0/", "run/0/step/9", "run/0/step/1/group/9", "run/0/steps", "run/-1",
     "run/0/prompt", "run/0/step/1/group/0/../1", "run/0/step/99999999999", "run/0/step/١"],
)  # fmt: skip
def test_what_is_not_there_is_said(pages: Pages, resource: str) -> None:
    with pytest.raises(NotThere):
        pages.document(resource)


def test_secrets_are_in_no_document(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "look at the square")
    pages = Pages([run])
    shown = json.dumps([pages.document(f"run/0/step/1{part}") for part in ("", "/group/0")])
    assert "look at the square" not in shown and shown.count("[redacted]") == 3  # the table, the text, its tokens


def test_a_run_of_an_older_version_is_shown(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1, "time": 5.0, "resumed_from": null}\n')
    shutil.copy(SCHEMA_1, tmp_path / "rollouts" / "step-000001.jsonl")
    pages = Pages([tmp_path])
    assert plain(pages, "run/0")["steps"] == [1]
    table = plain(pages, "run/0/step/1")
    assert table["rows"]["length"] == [3, 3, 1, 3, 1, 3] and table["rows"]["right"] == [None] * 6
    (first, *_) = plain(pages, "run/0/step/1/group/0")["members"]
    assert first["tokens"]["ids"] == [3, 4, 3, 4, 5, 3] and "text" not in first["tokens"]
    assert first["tokens"]["gap"][0] == pytest.approx(0.01) and first["tokens"]["gap"][2] is None
    assert "numbers and no texts" in plain(pages, "run/0")["tokens"]
    assert plain(pages, "run/0/prompt", id="7")[0]["members"][0]["index"] == 0


def test_a_live_run_shows_its_new_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", live=True)
    hidden = run / "rollouts" / "step-000002.parquet"
    aside = hidden.rename(tmp_path / "aside")
    pages = Pages([run])
    assert plain(pages, "run/0")["steps"] == [1] and plain(pages, "run/0")["attempts"][-1]["end"] is None
    table = plain(pages, "run/0/step/1")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "attempt": 2, "time": 1, "reward/mean": 0.9}\n{"step": 4, "att')
    shutil.copy(aside, hidden)
    found = plain(pages, "run/0")
    assert found["steps"] == [1, 2] and found["last_step"] == 3 and found["problem"] is None
    assert plain(pages, "run/0/metrics")["curves"]["reward/mean"] == [None, 0.4, 0.5, 0.9]
    shutil.copy(aside, run / "rollouts" / "step-000001.parquet")  # an attempt has taken the step again
    again = plain(pages, "run/0/step/1")
    assert {each["epoch"] for each in table["groups"]} == {0} and {each["epoch"] for each in again["groups"]} == {1}
    assert plain(pages, "run/0/step/1/group/0")["epoch"] == 1


def test_a_resumed_run_shows_neither_steps_nor_alarms_that_it_has_undone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    directory = RunDirectory.create(run, new=False)
    directory.event("alarm", step=1, monitor="early", message="of a step that stays")
    directory.begin_attempt(1)
    directory.event("alarm", step=2, monitor="late", message="of the new step 2")
    directory.release()
    found, events = plain(Pages([run]), "run/0"), plain(Pages([run]), "run/0/events")
    assert (found["steps"], found["evaluations"], found["blanks"]) == ([1], [0], [0])
    alarms = [(each["monitor"], each.get("undone", False)) for each in events if each["kind"] == "alarm"]
    assert alarms == [("length", True), ("length", True), ("early", False), ("late", False)]
    assert found["num_events"] == len(events)


def test_a_step_is_read_once_while_its_file_is_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.rollout.records.paging import GroupPages

    reads: list[Any] = []
    whole = GroupPages.index
    monkeypatch.setattr(GroupPages, "index", lambda *arguments: reads.append(1) or whole(*arguments))
    pages = Pages([run])
    for resource in ("run/0/step/1", "run/0/step/1/group/0", "run/0/step/1/group/3", "run/0/step/1"):
        pages.document(resource)
    assert len(reads) == 1


def test_several_threads_may_ask(pages: Pages) -> None:
    expected = {name: pages.document(name) for name in ("run/0/step/1/group/0", "run/0/step/2/group/3", "run/0")}
    wrong: list[str] = []

    def ask(name: str) -> None:
        wrong.extend(name for _ in range(5) if pages.document(name) != expected[name])

    threads = [threading.Thread(target=ask, args=(name,)) for name in expected for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_run_at_all_is_an_error(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        Pages([tmp_path])
    pages = Pages([run, tmp_path])
    assert "there is no run" in plain(pages, "runs")[1]["problem"] and set(plain(pages, "run/1")) == {"problem"}


def test_a_run_is_shown_without_torch(run: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from mmrl.viewer.pages import Pages
from mmrl.viewer.report import make_report
from mmrl.viewer import server
pages = Pages([Path({str(run)!r})])
for resource in ("run/0", "run/0/metrics", "run/0/step/1", "run/0/step/1/group/0", "run/0/evaluations"):
    pages.document(resource)
make_report([Path({str(run)!r})]).html()
assert not {{"torch", "transformers", "vllm", "pandas"}} & set(sys.modules)  # pandas takes a second
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
