"""What the viewer's page does with hostile rollouts, with what is damaged or missing, and without a server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.viewer.browser import PAGES, Viewer, served
from tests.viewer.made_run import make_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

MARKS = Path(__file__).with_name("marks.js").read_text()


def test_hostile_rollouts_are_text_on_every_page(viewer: Viewer) -> None:
    seen = 0
    for address in (*PAGES, "run/0/step/2/group/1?member=0&view=text", "run/0/step/2?q=<script>alert(1)</script>"):
        viewer.open(address)
        marks = viewer.script(MARKS)
        seen += marks.pop("shown")
        assert marks.pop("title").endswith("· mmrl"), address
        assert marks == {"scripts": 1, "foreign": 0, "handlers": 0, "hidden": 0}, address
    assert seen >= 6, "of the alarm's message, a prompt, a completion, calls"


def test_what_an_address_says_is_text_too(viewer: Viewer) -> None:
    viewer.open("run/0/<img src=x onerror=alert(1)>")
    assert "There is no page at this address" in viewer.text(".problem")
    viewer.open("run/0/prompt?id=" + "%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert(1)</script>" in viewer.text("h1")
    assert viewer.count("script") == 1
    viewer.complaints()  # the server has no such prompt, and the browser logs that


def test_what_cannot_be_shown_is_a_sentence(driver: Chrome, tmp_path: Path) -> None:
    run = make_run(tmp_path / "damaged")
    (run / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1 this is no parquet")
    shutil.rmtree(run / "media")
    (run / "events.jsonl").unlink()
    with served(run, tmp_path / "nothing") as server:
        viewer = Viewer.opened(driver, server.url)
        viewer.until(lambda: viewer.count("#main tbody tr") == 2, "a list of both")
        assert "there is no run" in viewer.text("#main tbody tr:nth-child(2)")
        viewer.open("run/0/step/1")
        assert "step-000001.parquet" in viewer.text(".problem")
        viewer.open("run/0/step/7")
        assert "there are no rollouts of step 7" in viewer.text(".problem")
        viewer.open("run/0/step/2/group/0")
        viewer.until(lambda: viewer.count(".pictures .problem") == 2, "two sentences for two images")
        assert "The run's folder has no such image, 56 × 56 pixels" in viewer.text(".pictures .problem")
        viewer.open("run/0/step/2/group/77")
        assert "step 2 has no group 77" in viewer.text(".problem")
        viewer.open("run/1/curves")
        assert "there is no run" in viewer.text(".problem")
        for address in ("run/0/about", "run/0/curves"):
            viewer.open(address)
            assert viewer.count(".problem") == 0, "a run without events is whole"
        assert viewer.strangers() == []
        viewer.complaints()


@pytest.mark.full
def test_a_live_run_grows_on_the_page_without_losing_the_place(driver: Chrome, tmp_path: Path) -> None:
    from mmrl.runs.directory import RunDirectory

    run = make_run(tmp_path / "live", live=True)
    directory = RunDirectory.create(run, new=False)
    try:
        with served(run) as server:
            viewer = Viewer.opened(driver, server.url)
            viewer.open("run/0/curves")
            assert viewer.text(".live") == "live, step 2"
            viewer.script("window.scrollTo(0, 300)")
            directory.append_metrics(3, {"reward/mean": 0.6, "loss/total": 0.03})
            viewer.until(lambda: viewer.text(".live") == "live, step 3", "the new step")
            mean = ".card[data-metric='reward/mean']"
            viewer.until(lambda: viewer.texts(f"{mean} .readout b") == ["0.6"], "the curve has grown")
            assert viewer.script("return scrollY") == 300
            viewer.open("run/0/step/1?follow=1")
            shutil.copy(run / "rollouts" / "step-000002.parquet", run / "rollouts" / "step-000003.parquet")
            viewer.until(lambda: viewer.address == "#/run/0/step/3?follow=1", "the newest step is followed")
            assert viewer.complaints() == []
            viewer.open("run/0/step/2/group/0")
        viewer.until(lambda: "has not answered since" in viewer.text("#notices"), "the server has ended")
        assert viewer.text("h1") == "Group 0", "what was read is still there"
    finally:
        directory.release()
    viewer.complaints()


# ---- A report


@pytest.fixture(scope="module")
def report(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mmrl.viewer.report import make_report

    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(make_report(runs[0], [2]).html())
    return file


def test_a_report_shows_its_pages_from_the_disk(driver: Chrome, report: Path) -> None:
    viewer = Viewer.opened(driver, report.as_uri())
    viewer.until(lambda: viewer.address == "#/run/0/curves", "the only run")
    assert "A report, made" in viewer.text("#notices") and "rollouts of 1 of 2 recorded steps" in viewer.text(
        "#notices"
    )
    shown = 0
    for address in (each for each in PAGES if each and not each.startswith("compare")):
        viewer.open(address)
        assert viewer.count(".problem") == 0, address
        marks = viewer.script(MARKS)
        shown += marks.pop("shown")
        assert marks.pop("title").endswith("· mmrl") and marks == {
            "scripts": 2,
            "foreign": 0,
            "handlers": 0,
            "hidden": 0,
        }
    assert shown >= 6
    viewer.open("run/0/step/2/group/0")
    viewer.until(lambda: viewer.script("return [...document.images].every((each) => each.naturalWidth)"), "thumbnails")
    viewer.open("run/0/step/2?q=数学 🙂 red")
    assert viewer.texts("#main tbody th[scope=row]") == ["0"], "the page searches what the report holds"
    viewer.press("j")
    viewer.until(lambda: viewer.address.startswith("#/run/0/step/2/group/0"), "keys work")
    viewer.reload()
    assert viewer.text("h1") == "Group 0", "an address within the file"
    viewer.open("run/0/step/1")
    assert "This report leaves that out" in viewer.text(".problem")
    assert viewer.complaints() == []
    assert viewer.strangers() == []


# ---- The script itself


def test_the_script_has_no_door_for_markup_or_code() -> None:
    folder = Path("mmrl/viewer/page")
    script, style, html = ((folder / f"viewer.{kind}").read_text() for kind in ("js", "css", "html"))
    doors = (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        "import(",
        "</script",
    )
    assert [door for door in doors if door in script] == []
    assert "url(" not in style and "@import" not in style
    assert " style=" not in html and " onclick=" not in html
    lines = ('<link rel="stylesheet" href="viewer.css">', "<!-- report -->", '<script src="viewer.js"></script>')
    assert [html.count(line) for line in lines] == [1, 1, 1]
