"""The time line of the ranks: its document number by number, and how the page shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mmrl.runs.directory import RunDirectory
from mmrl.viewer.pages import Pages
from tests.viewer.browser import Viewer, chromium, missing, served
from tests.viewer.made_run import CONFIG

TURNS = {"perf/step_s": 10.0, "perf/sync_s": 1.0, "perf/prompts_s": 0.5, "perf/generate_s": 4.0, "perf/score_s": 0.5,
         "perf/update_s": 3.0}  # fmt: skip
APART = {"perf/step_s": 6.0, "perf/sync_s": 0.5, "perf/generate_s": 5.0, "perf/gather_s": 6.0}


def write(folder: Path, *lines: tuple[int, float, Mapping[str, float]]) -> Path:
    """A run with these steps, each with the time of its line."""
    directory = RunDirectory.create(folder)
    directory.begin_attempt(None, command=["mmrl", "train"], changes=[])
    directory.write_config(CONFIG)
    directory.end_attempt(0)
    directory.release()
    text = [{"step": step, "attempt": directory.attempt, "time": time, **values} for step, time, values in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in text))
    return folder


def spans(run: Path) -> Any:
    return json.loads(json.dumps(Pages([run]).document("run/0/timeline", {}), allow_nan=False))


def test_ranks_in_turns_sample_and_then_learn(tmp_path: Path) -> None:
    """Checkpoint and evaluation come after the step, and its line after both."""
    after = {"perf/save_s": 2.0, "perf/eval_s": 3.0}
    found = spans(write(tmp_path / "run", (0, 100.0, {"perf/eval_s": 1.0}), (1, 115.0, TURNS | after)))
    assert found["apart"] is False
    assert [each["step"] for each in found["steps"]] == [1]
    assert found["steps"][0]["spans"] == [
        ["sampler", "sync", 0.0, 1.0],
        ["sampler", "sample", 1.0, 6.0],
        ["learner", "learn", 6.0, 10.0],
        ["learner", "save", 10.0, 12.0],
        ["sampler", "evaluate", 12.0, 15.0],
    ]


def test_ranks_apart_have_gathered_before_the_learner_takes_the_groups(tmp_path: Path) -> None:
    """The learner waits 2 s for step 1. Step 2's groups were ready 1 s before it took them, without waiting."""
    first = APART | {"perf/wait_s": 2.0, "perf/queued_s": 0.0, "perf/gather_s": 2.0}
    second = APART | {"perf/wait_s": 0.0, "perf/queued_s": 1.0, "perf/gather_s": 2.5, "perf/publish_s": 0.5}
    found = spans(write(tmp_path / "run", (1, 106.0, first), (2, 112.0, second)))
    assert found["apart"] is True
    one, two = (each["spans"] for each in found["steps"])
    assert one == [
        ["sampler", "sync", 0.0, 0.5],
        ["sampler", "sample", 0.5, 2.0],
        ["learner", "learn", 2.0, 6.0],
    ]
    assert two == [
        ["sampler", "sync", 3.0, 3.5],
        ["sampler", "sample", 3.5, 5.5],
        ["learner", "publish", 6.0, 6.5],
        ["learner", "learn", 6.5, 12.0],
    ]


def test_steps_without_seconds_and_lines_that_are_no_numbers_have_no_spans(tmp_path: Path) -> None:
    odd: Any = {"perf/step_s": 1.0, "perf/generate_s": None, "perf/gather_s": None, "perf/sync_s": -1.0}
    found = spans(write(tmp_path / "run", (1, 5.0, {"loss/total": 1.0}), (2, 9.0, odd)))
    assert [(each["step"], each["spans"]) for each in found["steps"]] == [(2, [["learner", "learn", 0.0, 1.0]])]
    assert spans(write(tmp_path / "empty"))["steps"] == []


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("timelines")
    waits = {"perf/wait_s": 3.0, "perf/queued_s": 0.0}
    apart = [(step, 100.0 + 6 * step, APART | waits | {"perf/gather_s": 3.0}) for step in range(1, 41)]
    turns = [(step, 100.0 + 10 * step, TURNS) for step in range(1, 4)]
    runs = write(folder / "apart", *apart), write(folder / "turns", *turns)
    with served(*runs) as server, chromium() as driver:
        found = Viewer.opened(driver, server.url)
        yield found
        assert found.complaints() == []
        assert found.strangers() == []


@pytest.mark.full
def test_the_page_draws_both_sides_and_says_how_long_they_did_nothing(viewer: Viewer) -> None:
    viewer.open("run/0/about")
    assert "Time line" in viewer.texts("#main section > h2")
    viewer.script("document.querySelector('.timeline').scrollIntoView()")
    viewer.until(lambda: viewer.count(".timeline rect.span-learn") == 12, "the last twelve steps are drawn")
    assert viewer.count(".timeline rect.span-sample") == viewer.count(".timeline rect.span-sync") == 12
    assert viewer.texts(".timeline rect.span-learn title")[-1] == "step 40: learning, 3 s"
    label = viewer.script("return document.querySelector('.timeline svg').getAttribute('aria-label')")
    assert label.startswith("Time line of steps 29 to 40: ranks that sample do not 50")
    rows = viewer.texts("[aria-label='Seconds of both sides'] tbody tr")
    assert rows[0].startswith("sample6 s30 s") and rows[1].startswith("learn")
    viewer.script("const all = document.querySelectorAll('section select'); const one = [...all].at(-1);"
                  "const own = [...all].find((each) => each.closest('section').querySelector('.timeline'));"
                  "own.selectedIndex = 1; own.dispatchEvent(new Event('change'));")  # fmt: skip
    viewer.until(lambda: viewer.count(".timeline rect.span-learn") == 40, "all forty are drawn")


@pytest.mark.full
def test_ranks_in_turns_are_told_to_be_the_same(viewer: Viewer) -> None:
    viewer.open("run/1/about")
    assert "The same ranks sample and learn, in turns." in viewer.text()
    viewer.script("document.querySelector('.timeline').scrollIntoView()")
    viewer.until(lambda: viewer.count(".timeline rect.span-learn") == 3, "three steps are drawn")
