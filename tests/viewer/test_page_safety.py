"""What the viewer's page does with hostile rollouts, with what is damaged or missing, and without a server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmrl.rollout.records import read_lines
from mmrl.runs.directory import RunDirectory
from mmrl.viewer.pages import MODULES, page_file, page_script
from mmrl.viewer.report import make_report
from tests.rollout.test_records import SCHEMA_1
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


def test_axes_of_any_numbers_have_some_marks(joined: Viewer) -> None:
    pairs = [[1 - 2**-53, 1], [0.3, 0.1 + 0.2], [-1e308, 1e308], [0, 5e-324], [1e15, 1e15 + 0.5], [7, 7]]
    found = joined.script("return arguments[0].map(([least, greatest]) => ticks(least, greatest, 4).length)", pairs)
    assert found == [1] * len(pairs)
    assert joined.script("return [ticks(0, 1, 4), ticks(-20, 30, 4), logTicks(0.01, 100)]") == [
        [0, 0.25, 0.5, 0.75, 1], [-20, 0, 20], [0.01, 0.1, 1, 10, 100]
    ]  # fmt: skip
    assert (
        joined.script("return [logTicks(0, 1), logTicks(1, Infinity), logTicks(-1, 1)].map((some) => some.length)")
        == [1] * 3
    )
    texts = "return arguments[0].map((some) => some.map(tickText(some)))"
    near = [[0.99991, 0.99992, 0.99993], [1.2341e-5, 1.2342e-5], [0, 0.25, 0.5], [100000, 200000]]
    assert joined.script(texts, near) == [
        ["0.99991", "0.99992", "0.99993"], ["1.2341e-5", "1.2342e-5"], ["0", "0.25", "0.5"], ["100000", "200000"]
    ]  # fmt: skip
    values = [[-1e308, 0, 1e308], [0, 5e-324, 1e-323], [1, 1 + 2**-52, 1 + 2**-51]]
    script = "return arguments[0].map((some) => binned(some).reduce((sum, { count }) => sum + count, 0))"
    assert joined.script(script, values) == [3] * 3


def test_texts_are_made_plain_and_addresses_take_halves_of_surrogate_pairs(joined: Viewer) -> None:
    assert joined.script("return encoded('a \\ud800 b')") == "a%20%EF%BF%BD%20b"
    hidden = joined.script("return plain('\\u2800\\ufff0\\u{1bca0}\\ufe0f')")
    assert hidden == "⟨U+2800⟩⟨U+FFF0⟩⟨U+1BCA0⟩\ufe0f"


def strange(folder: Path) -> Path:
    """A run whose numbers are hardly apart, or as far as they can be, and texts and objects where numbers should be."""
    run, turned = make_run(folder), "7\u202e8"
    curves = {"a/near": [1 - 2**-53, 1], "a/far": [-1e308, 1e308], "a/large": [1e308] * 2, "__proto__": [1, 2]}
    with (run / "metrics.jsonl").open("a") as file:
        for step in (3, 4):
            values = {name: some[step - 3] for name, some in curves.items()}
            file.write(json.dumps({"step": step, "attempt": 2, "time": 5, **values}) + "\n")
    odd = {"toString": 1, "valueOf": 1}
    with (run / "events.jsonl").open("a") as file:
        for event in (
            {"step": turned, "monitor": odd},
            {"step": 2, "monitor": odd, "message": odd},
            {"message": [odd]},
        ):
            file.write(json.dumps({"time": 5, "kind": "alarm", **event}) + "\n")
    lines = [json.loads(line) for line in SCHEMA_1.read_text().splitlines()]
    for line in lines:
        line |= {"prompt_id": "lone \ud800", "source": odd, "index": turned, "components": {"valueOf": 1}}
        line["images"] = [{"hash": "abc", "width": turned, "height": turned}]
    (run / "rollouts" / "step-000003.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_strange_values_break_no_page(driver: Chrome, tmp_path: Path) -> None:
    with served(strange(tmp_path / "one"), make_run(tmp_path / "other")) as server:
        viewer = Viewer.opened(driver, server.url)
        for log in ("", "&log=1"):
            viewer.open(f"run/0/curves?names=a/near,a/far,a/large,__proto__,reward/mean{log}")
            assert viewer.count(".card") == 5
            viewer.until(lambda: viewer.count(".chart path.line") == 5, "each of the charts is drawn")
            assert "7⟨U+202E⟩8" in viewer.text(".alarms") and "valueOf" in viewer.text(".alarms")
            assert viewer.script(MARKS)["hidden"] == 0
        pages = ("run/0/step/3", "run/0/step/3?by=rollout&sort=index", "run/0/step/3/plots", "run/0/step/3/group/0")
        pages += ("run/0/prompt?id=lone%20%ED%A0%80", "run/0/evaluations?which=constructor", "run/0/about")
        for address in (*pages, "compare?runs=0,1&tab=constructor", "compare?runs=0,1&tab=prompt"):
            viewer.open(address)
            assert viewer.count("#main h1") and viewer.count("#main > .problem") == 0, address
            assert viewer.script(MARKS)["hidden"] == 0, address
        assert [each for each in viewer.complaints() if "status of 404" not in each] == []


def test_a_chart_that_cannot_be_drawn_hides_no_other(viewer: Viewer) -> None:
    viewer.open("run/0/step/2")
    viewer.script(
        "const set = Element.prototype.setAttribute;"
        "Element.prototype.setAttribute = function (name, value) {"
        "  if (name === 'd' && !window.failed) { window.failed = true; throw new Error('no') }"
        "  return set.call(this, name, value);"
        "}"
    )
    viewer.open("run/0/curves?names=reward/mean,loss/total,policy/entropy")
    viewer.until(lambda: viewer.count(".chart path.line") == 2, "the others are drawn")
    assert viewer.text(".chart .problem") == "This chart cannot be drawn."
    assert "Error: no" in viewer.complaints()[0]
    viewer.reload()


def test_a_run_that_was_cut_off_and_curves_of_one_run_alone(driver: Chrome, tmp_path: Path) -> None:
    """Alarms of a run are marked on the curves that it has."""
    cut, other = make_run(tmp_path / "cut", live=True), make_run(tmp_path / "other")
    with (other / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "attempt": 2, "loss/total": 0.03, "loss/of_the_other": 1.0}) + "\n")
    (other / "events.jsonl").unlink()
    with served(cut, other) as server:
        viewer = Viewer.opened(driver, server.url)
        viewer.open("run/0/about")
        assert "cut off: it was killed, or its machine stopped" in viewer.text(".facts")
        viewer.open("run/1/about")
        assert "cut off" not in viewer.text(".facts")
        for name, count in (("loss/total", 1), ("loss/of_the_other", 0)):
            viewer.open(f"compare?runs=0,1&by=run&names={name}")
            viewer.until(lambda: viewer.count("path.line") == 2, "the curves are drawn")
            assert viewer.count(".mark.alarm") == count, name
        viewer.open("run/0/step/7/group/0")
        assert "there are no rollouts of step 7" in viewer.text(".problem")


def test_prompts_of_one_name_that_ask_something_else_are_not_compared_as_one(driver: Chrome, tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    shutil.rmtree(other / "evaluations")
    records = list(read_lines(other / "rollouts" / "step-000002.parquet"))
    for record in records:
        if record["prompt_id"] == "shapes/0":
            record |= {"answer": "9", "messages": [{"role": "user", "content": "How many?"}]}
    (other / "rollouts" / "step-000003.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    with served(one, other) as server:
        viewer = Viewer.opened(driver, server.url)
        viewer.open("compare?runs=0,1&tab=prompt&prompt=shapes/2")
        assert viewer.count(".asked") == 1
        names = "return [...document.querySelectorAll('#shared-prompts option')].map((each) => each.value)"
        assert sorted(viewer.script(names)) == ["shapes/1", "shapes/2", "shapes/3", "shapes/4"]
        viewer.open("compare?runs=0,1&tab=prompt&prompt=shapes/0")
        assert viewer.texts(".side .asked .text") == ["What colour is shape 0?", "How many?"]
        assert viewer.texts(".side .asked dd") == ["red", "9"] and viewer.count(".asked") == 2


@pytest.mark.full
def test_a_live_run_grows_on_the_page_without_losing_the_place(driver: Chrome, tmp_path: Path) -> None:
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
            flat = ".fold .fold .card[data-metric='group/zero_signal_fraction']"
            assert viewer.count(flat) == 0 and viewer.texts(".alarms h2") == ["▼ 1 alarm"]
            for step in (4, 5):
                directory.append_metrics(step, {"reward/mean": 0.6, "group/zero_signal_fraction": 0.2})
            viewer.until(lambda: viewer.count(flat) == 1, "a curve that has not changed is folded")
            directory.append_metrics(6, {"reward/mean": 0.6, "group/zero_signal_fraction": 0.4})
            viewer.until(lambda: viewer.count(flat) == 0, "and is not when it changes")
            directory.event("alarm", step=6, monitor="loud", message="within a step")
            viewer.until(lambda: viewer.texts(".alarms h2") == ["▼ 2 alarms"], "the new event")
            (tmp_path / "live.html").write_text(make_report([run]).html())
            viewer.open("run/0/step/1?follow=1")
            shutil.copy(run / "rollouts" / "step-000002.parquet", run / "rollouts" / "step-000003.parquet")
            viewer.until(lambda: viewer.address == "#/run/0/step/3?follow=1", "the newest step is followed")
            assert viewer.complaints() == []
            directory.begin_attempt(2)
            viewer.until(lambda: "no rollouts of step 3" in str(viewer.texts("#main .problem")), "it is undone")
            viewer.open("run/0/step/2/group/0")
        viewer.until(lambda: "has not answered since" in viewer.text("#notices"), "the server has ended")
        viewer.complaints()
        assert viewer.text("h1") == "Group 0", "what was read is still there"
    finally:
        directory.release()
    shown = Viewer.opened(driver, (tmp_path / "live.html").as_uri())
    shown.open("run/0/step/1")
    assert shown.text(".live") == "live when this report was made, step 6"
    assert shown.count("nav.step-bar .check") == 0, "nothing is followed in a report"


# ---- A report


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
    assert viewer.texts("select[aria-label=Step] option") == ["step 2"], "the steps that are inside"
    viewer.open("run/0/step/1")
    assert "This report leaves that out" in viewer.text(".problem")
    assert viewer.complaints() == []
    assert viewer.strangers() == []


# ---- The script itself


def test_the_scripts_have_no_door_for_markup_or_code() -> None:
    style, html = (page_file(f"viewer.{kind}").decode() for kind in ("css", "html"))
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
    assert [door for door in doors for name in MODULES if door in page_file(f"{name}.js").decode()] == []
    assert "url(" not in style and "@import" not in style
    assert " style=" not in html and " onclick=" not in html
    lines = ('<link rel="stylesheet" href="viewer.css">', "<!-- report -->", '<script type="module" src="start.js">')
    assert [html.count(line) for line in lines] == [1, 1, 1]


DECLARED = re.compile(r"^(export )?(?:async function|function|class|const|let) (\w+)", re.MULTILINE)
IMPORTED = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)


def test_modules_declare_each_name_once_and_import_what_earlier_ones_export() -> None:
    """So that they may be joined, and none begins before what it needs."""
    assert sorted(MODULES) == sorted(path.stem for path in Path("mmrl/viewer/page").glob("*.js"))
    owner = dict[str, str]()
    exported, used = set[tuple[str, str]](), set[tuple[str, str]]()
    for place, module in enumerate(MODULES):
        text = page_file(f"{module}.js").decode()
        assert text.count("import {") == len(IMPORTED.findall(text)) and "export {" not in text, module
        for names, source in IMPORTED.findall(text):
            assert source in MODULES[:place], f"{module} imports {source}"
            used |= {(source, name.strip()) for name in names.split(",") if name.strip()}
        for export, name in DECLARED.findall(text):
            assert name not in owner, f"{name}: {owner.get(name)} and {module}"
            owner[name] = module
            exported |= {(module, name)} if export else set()
    assert used == exported
    joined = page_script()
    assert "import {" not in joined and not re.search("^export ", joined, re.MULTILINE)
    assert len(DECLARED.findall(joined)) == len(owner) > 250
