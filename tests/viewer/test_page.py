"""The viewer's page in a real browser: what each page shows, by which keys, and what hostile rollouts do to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.viewer.browser import Viewer, chromium, missing, served
from tests.viewer.made_run import make_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PAGES = (
    *("run/0/curves", "run/0/step/2", "run/0/step/2?by=rollout", "run/0/step/2/plots", "run/0/step/2/group/0"),
    *("run/0/step/2/group/1?view=tokens", "run/0/step/2/group/3?view=episode", "run/0/step/2/group/4"),
    *("run/0/evaluation/2", "run/0/evaluations", "run/0/prompt?id=shapes/1", "run/0/about"),
    *("", "compare?runs=0,1", "compare?runs=0,1&tab=config", "compare?runs=0,1&tab=prompt&prompt=shapes/1"),
)
"""An address of each kind of page."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that differ in a key of their configs."""
    folder = tmp_path_factory.mktemp("runs")
    one, other = make_run(folder / "shapes"), make_run(folder / "shapes-again")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.01"))
    return one, other


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(runs: tuple[Path, Path]) -> Iterator[str]:
    with served(*runs) as server:
        yield server.url


@pytest.fixture
def viewer(driver: Chrome, url: str) -> Iterator[Viewer]:
    """A page of both runs, which must neither complain nor ask anybody else."""
    found = opened(driver, url)
    yield found
    found.width(1280)
    found.scheme("light")
    assert found.complaints() == []
    assert found.strangers() == []


def opened(driver: Chrome, url: str) -> Viewer:
    found = Viewer(driver, url, url.partition("?")[0])
    found.complaints(), found.strangers()  # of another page before it
    return found


# ---- What the pages show


def test_each_metric_has_a_curve_with_attempts_and_alarms_marked(viewer: Viewer) -> None:
    viewer.open("run/0/curves")
    assert viewer.texts(".fold > summary")[:2] == ["eval 1", "reward 2"]
    assert {"eval/accuracy", "reward/mean", "perf/step_s"} <= set(viewer.texts(".card h3"))
    chart = ".card[data-metric='reward/mean']"
    viewer.until(lambda: viewer.count(f"{chart} path.line"), "the curve is drawn")
    assert viewer.texts(f"{chart} .readout b") == ["0.5"]
    assert viewer.count(f"{chart} circle.dot") == 2, "reward/mean has a value at steps 1 and 2"
    [attempt, alarm] = viewer.texts(f"{chart} .mark title")
    assert attempt == "attempt 2 went on from step 1, with 1 change of the config"
    assert alarm.startswith("alarm at step 2, length: the reward pays length")
    assert "1 alarm" in viewer.text(".alarms h2")


def test_curves_are_filtered_smoothed_and_put_on_a_log_scale_by_their_address(viewer: Viewer) -> None:
    viewer.open("run/0/curves?names=reward/mean,eval/accuracy")
    assert viewer.texts(".card h3") == ["reward/mean", "eval/accuracy"]
    viewer.open("run/0/curves")
    viewer.type("input[type=search]", "REWARD entropy")
    viewer.until(lambda: viewer.texts(".card h3") == ["reward/mean", "reward/exact_mean", "policy/entropy"], "filtered")
    viewer.type("input[type=range]", "0.6")
    viewer.click(".tools .check input")
    assert viewer.address == "#/run/0/curves?q=REWARD+entropy&smooth=0.6&log=1"
    viewer.reload()
    assert viewer.texts(".card h3") == ["reward/mean", "reward/exact_mean", "policy/entropy"]
    assert viewer.texts("output") == ["0.60"]


def test_a_curve_tells_the_value_of_the_step_under_the_crosshair(viewer: Viewer) -> None:
    viewer.open("run/0/curves?names=eval/accuracy")
    viewer.until(lambda: viewer.count("path.line"), "the curve is drawn")
    viewer.script("document.querySelector('.chart').focus()")
    viewer.press("\ue012")  # left: from the end
    assert viewer.text(".readout").startswith("step 20.75")
    viewer.press("\ue012")
    assert viewer.text(".readout").startswith("step 00.25"), "step 1 has no evaluation"
    assert viewer.text("#said").startswith("step 0")


def test_a_steps_groups_are_sorted_filtered_and_searched(viewer: Viewer) -> None:
    viewer.open("run/0/step/2")
    assert viewer.texts("#main tbody th[scope=row]") == ["0", "1", "2", "3", "4"]
    assert viewer.text(".count-line p") == "5 groups"
    viewer.open("run/0/step/2?sort=-reward")
    assert viewer.texts("#main tbody th[scope=row]") == ["4", "0", "3", "1", "2"], "mean rewards 1, 0.85, 0.45, 0.3, 0"
    viewer.open("run/0/step/2?state=dropped")
    assert viewer.texts("#main tbody th[scope=row]") == ["4"]
    viewer.open("run/0/step/2?by=rollout&right=yes")
    assert viewer.count("#main tbody tr") == 8, "three of group 0, one of group 1, and all four of group 4"
    viewer.open("run/0/step/2?by=rollout&rmin=1.1")
    assert viewer.count("#main tbody tr") == 2
    viewer.open("run/0/step/2?q=walk to THE goal")
    assert viewer.texts("#main tbody th[scope=row]") == ["3"], "the prompt of the episodes"
    viewer.type("input[type=search]", "数学 🙂 red")
    viewer.until(lambda: viewer.texts("#main tbody th[scope=row]") == ["0"], "found in a completion")
    viewer.reload()
    assert viewer.texts("#main tbody th[scope=row]") == ["0"]


def test_a_group_shows_images_prompt_gold_and_what_each_reward_read(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0")
    viewer.until(lambda: viewer.script("return [...document.images].every((each) => each.naturalWidth)"), "images")
    assert viewer.texts(".picture figcaption") == [
        "image 1 of 2: 56 × 56 pixels, shown ×4",
        "image 2 of 2: 84 × 56 pixels, shown ×2",
    ]
    assert viewer.script("return document.querySelector('.picture img').naturalWidth") == 56
    assert viewer.text(".gold") == "red"
    assert "What colour is shape 0?" in viewer.text(".messages")
    assert viewer.text(".why").startswith("Trained on")
    rows = viewer.texts("section .scroll tbody tr")
    assert len(rows) == 5 and rows[4].startswith("greedy")
    assert "read blue." in rows[1], "the answer that exact read in completion 1"
    assert viewer.texts(".member-head b") == [*(f"completion {n}" for n in range(4)), "greedy"]


def test_a_dropped_group_says_why(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/4")
    assert "rejected it" in viewer.text(".why") and "all 4 valid rewards are 1" in viewer.text(".why")


def test_tokens_are_coloured_by_a_quantity_and_tell_its_exact_numbers(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0?member=1&color=advantage")
    tokens = viewer.count(".tokens .token")
    assert viewer.count(".tokens .token.low") == tokens, "completion 1 has the least reward of its group"
    assert viewer.texts(".tokens .token.special") == ["<|im_end|>"]
    assert "I·look·at·the·square." in viewer.text(".tokens")
    viewer.script("document.querySelector('.tokens .token').focus()")
    details = viewer.text(".token-details")
    assert "advantage-0.85" in details and "log-prob of the sampler-0.01" in details and "gap" in details
    viewer.press("\ue014")  # right
    assert "2 of" in viewer.text(".token-details")
    viewer.press("c")
    assert "color=sampler_logprob" in viewer.address
    strengths = "return [...document.querySelectorAll('.tokens .token')].map((each) => +each.style.getPropertyValue('--strength'))"
    shades = viewer.script(strengths)
    assert shades[0] < 0.05 and shades[-1] > 0.95 and shades == sorted(shades), "log-probs fall from -0.01 to -2.5"


def test_characters_that_are_hidden_or_turn_text_around_are_symbols(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/1?view=text")
    text = viewer.text(".member-panel .text")
    assert "bidi ⟨U+202E⟩gnp.exe⟨U+202C⟩, control ⟨ESC⟩[31m⟨BEL⟩⟨NUL⟩" in text
    assert "lone ⟨U+D800⟩, lines ⟨U+2028⟩⟨U+2029⟩" in text
    assert viewer.texts(".member-panel .text .hidden-character")[0] == "⟨U+202E⟩"


def test_an_episode_shows_turns_calls_observations_and_rewards(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/3?member=0")
    assert viewer.texts(".turn h3") == ["Turn 1", "Turn 2", "Turn 3"]
    assert viewer.texts(".turn .bubble.policy > .text") == [f"I go right, turn {n}." for n in range(3)]
    assert viewer.count(".turn .picture img") == 2
    assert "calls move" in viewer.text(".call") and '"to": "right"' in viewer.text(".call")
    assert "reward 1" in viewer.texts(".turn-head")[2] and "done" in viewer.texts(".turn-head")[2]
    counts = viewer.script("return [...document.querySelectorAll('.turn-head > span:nth-child(2)')].map((e) => e.textContent)")
    assert all("of the policy" in each for each in counts) and counts[2].endswith(", 0 inserted")
    viewer.open("run/0/step/2/group/3?member=0&view=tokens")
    assert viewer.texts(".turn-mark") == ["turn 1", "turn 2", "turn 3"]
    assert viewer.count(".tokens .token.given") > 0
    viewer.open("run/0/step/2/group/3?member=1")
    assert "this is no JSON" in viewer.text(".call.failed")
    viewer.open("run/0/step/2/group/3?member=2")
    assert "the world did not answer in 5 s" in viewer.text(".member-panel .problem")


def test_a_prompt_is_followed_over_steps_and_evaluations(viewer: Viewer) -> None:
    viewer.open("run/0/prompt?id=shapes/0")
    titles = [each.partition(" epoch")[0] for each in viewer.texts(".fold > summary")]
    assert titles == [
        *("Blank pictures at step 0", "Evaluation at step 0", "Step 1"),
        *("Blank pictures at step 2", "Evaluation at step 2", "Step 2"),
    ]
    viewer.click(".fold tbody a")
    viewer.until(lambda: "/group/0?member=0" in viewer.address, "a link to the group")


def test_plots_tell_the_correlation_within_groups(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/plots")
    assert "Within groups, reward and length have a mean correlation of" in viewer.text(".plots")
    viewer.until(lambda: viewer.count(".plots circle.point"), "the points are drawn")
    titles = ["Reward against length", "Rewards", "Lengths in tokens"]
    assert viewer.texts(".plot figcaption")[:3] == titles
    viewer.script("document.querySelector('.plots').scrollIntoView(false)")
    viewer.until(lambda: viewer.count(".plots rect.bar"), "the histograms are drawn")


def test_evaluations_are_shown_beside_those_with_blank_pictures(viewer: Viewer) -> None:
    viewer.open("run/0/evaluations")
    head = viewer.texts("#main thead th")
    assert [each.strip() for each in head] == ["prompt", "gold", "change", "step 0", "step 2", "blank 0", "blank 2"]
    assert viewer.texts("#main tbody tr")[1] == "shapes/1blue+1✗✓✗✗", "wrong, then right; wrong without its picture"
    viewer.open("run/0/evaluations?which=blind")
    assert viewer.texts("#main tbody th") == ["shapes/0"], "right once of two times without its picture"


def test_about_has_config_with_origins_attempts_events_ledger_environment_and_seconds(viewer: Viewer) -> None:
    viewer.open("run/0/about")
    headings = ["Attempts", "Config", "Seconds by phase", "Events", "Ledger", "Environment"]
    assert viewer.texts("#main section > h2") == headings
    text = viewer.text()
    assert "learner.lr: 0.01 -> 0.001" in text and "stopped by SIGTERM" in text
    assert "learner.lr0.001command line" in text and "sampler.group_size4examples/shapes.yaml:14" in text
    assert "generate3 s6 s60.0 %" in text, "3 of 5 seconds in both steps"
    assert "the image has no pixels" in text and "engine.device_nameCPU" in text
    viewer.open("run/0/about?config=learner")
    assert viewer.texts("[aria-label=Config] tbody th") == ["learner.lr", "learner.epochs"]


def test_two_runs_are_compared_by_curves_config_and_prompt(viewer: Viewer) -> None:
    viewer.open("compare?runs=0,1&names=reward/mean")
    viewer.until(lambda: viewer.count("path.line") == 2, "two curves")
    assert viewer.texts(".readout .of") == ["shapes", "shapes-again"]
    viewer.open("compare?runs=0,1&tab=config")
    assert viewer.texts("#main tbody tr") == ["learner.lr0.001command line0.01command line"]
    viewer.open("compare?runs=0,1&tab=prompt&prompt=shapes/0")
    assert viewer.texts(".side h2") == ["shapes", "shapes-again"]
    assert viewer.count(".side") == 2 and viewer.count(".side:nth-child(2) tbody tr") > 8


# ---- Keys, widths, colours


def test_keys_lead_through_groups_and_steps(viewer: Viewer) -> None:
    viewer.open("run/0/step/1?sort=-reward")
    viewer.press("j")
    viewer.until(lambda: viewer.address == "#/run/0/step/1/group/4?sort=-reward", "the first group as sorted")
    viewer.drawn()
    viewer.until(lambda: viewer.text("h1") == "Group 4", "drawn")
    for key, address in (
        ("j", "#/run/0/step/1/group/0?sort=-reward"),
        ("n", "#/run/0/step/2/group/0?sort=-reward"),
        ("k", "#/run/0/step/2/group/4?sort=-reward"),
        ("p", "#/run/0/step/1/group/4?sort=-reward"),
    ):
        viewer.press(key)
        viewer.until(lambda: viewer.address == address, f"{key} leads to {address}")  # noqa: B023
        path = address.partition("?")[0].removeprefix("#/")
        viewer.until(lambda: viewer.script("return document.querySelector('#main').dataset.page") == path, path)  # noqa: B023
    viewer.press("m", "m")
    assert "member=2" in viewer.address
    viewer.press("u")
    viewer.until(lambda: viewer.address == "#/run/0/step/1?sort=-reward", "up to the step")
    viewer.until(lambda: viewer.count("input.search"), "drawn")
    viewer.press("/", "j")
    focus = "return [document.activeElement.type, document.activeElement.value]"
    assert viewer.script(focus) == ["search", "j"], "typing moves nowhere"


def test_help_lists_the_keys(viewer: Viewer) -> None:
    viewer.press("?")
    assert viewer.script("return document.getElementById('help').open")
    viewer.press("\ue00c")
    assert not viewer.script("return document.getElementById('help').open")


def test_no_page_is_wider_than_a_narrow_window(viewer: Viewer) -> None:
    viewer.width(400)
    for address in PAGES:
        viewer.open(address)
        viewer.script("window.scrollTo(0, 400)")
        assert viewer.script("return document.documentElement.scrollWidth") <= 400, address


CONTRAST = """
const parts = (color) => (color.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
const over = ([r, g, b, a = 1], below) => [r, g, b].map((each, i) => each * a + below[i] * (1 - a));
const light = (color) => color.map((each) => each / 255).map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
  .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  const layers = [];
  for (let each = node; each; each = each.parentElement) layers.push(parts(getComputedStyle(each).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const poor = [];
for (const node of document.querySelectorAll('body *')) {
  const style = getComputedStyle(node);
  const isShown = node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && !node.closest('[disabled], .off, .unseen, #skip, option, datalist');
  if (!isShown || ![...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim())) continue;
  const below = ground(node), color = over(parts(node.closest('svg') ? style.fill : style.color), below);
  const [one, other] = [light(below), light(color)].sort((a, b) => b - a);
  const ratio = (one + 0.05) / (other + 0.05);
  if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${node.tagName}.${node.className?.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`);
}
return [poor, getComputedStyle(document.documentElement).backgroundColor];
"""


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(247, 247, 245)"), ("dark", "rgb(20, 23, 26)")])
def test_text_is_readable_in_the_dark_and_in_the_light(viewer: Viewer, scheme: str, ground: str) -> None:
    viewer.scheme(scheme)
    for address in (*PAGES, "run/0/step/2/group/1?view=tokens&color=entropy&member=1"):
        viewer.open(address)
        poor, found = viewer.script(CONTRAST)
        assert found == ground
        assert poor == [], address


def test_controls_and_images_have_names_and_pages_one_heading(viewer: Viewer) -> None:
    nameless = (
        "return [...document.querySelectorAll('input, select, button, img, svg[role=img]')].filter((each) => "
        "!(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim() || each.hasAttribute('alt')))"
        ".map((each) => each.outerHTML)"
    )
    for address in PAGES:
        viewer.open(address)
        assert viewer.script(nameless) == [], address
        assert viewer.count("h1") == 1, address
        assert viewer.script("return document.title").endswith("· mmrl")


# ---- Hostile texts, and what cannot be shown

MARKS = """
const nodes = [...document.querySelectorAll('*')];
const texts = [document.body.innerText, ...nodes.flatMap((node) => [...node.attributes].map((each) => each.value))];
return {
  title: document.title, scripts: document.scripts.length,
  foreign: nodes.filter((node) => ['B', 'IMG', 'A'].includes(node.tagName)
    && (/^(x|javascript:)/.test(node.getAttribute('src') ?? node.getAttribute('href') ?? '') || node.textContent === 'bold')).length,
  handlers: nodes.filter((node) => [...node.attributes].some((each) => each.name.startsWith('on') || each.name === 'style' && /url/.test(each.value))).length,
  hidden: texts.filter((text) => /[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u202a-\\u202e\\u2028\\u2029\\u2066-\\u2069]/.test(text)).length,
  shown: document.body.textContent.includes('<img src=x onerror='),
};
"""


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
        viewer = opened(driver, server.url)
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
            viewer = opened(driver, server.url)
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
    viewer = opened(driver, report.as_uri())
    viewer.until(lambda: viewer.address == "#/run/0/curves", "the only run")
    assert "A report, made" in viewer.text("#notices") and "rollouts of 1 of 2 recorded steps" in viewer.text("#notices")
    shown = 0
    for address in (each for each in PAGES if each and not each.startswith("compare")):
        viewer.open(address)
        assert viewer.count(".problem") == 0, address
        marks = viewer.script(MARKS)
        shown += marks.pop("shown")
        assert marks.pop("title").endswith("· mmrl") and marks == {"scripts": 2, "foreign": 0, "handlers": 0, "hidden": 0}
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
    doors = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "import(", "</script")
    assert [door for door in doors if door in script] == []
    assert "url(" not in style and "@import" not in style
    assert " style=" not in html and " onclick=" not in html
    lines = ('<link rel="stylesheet" href="viewer.css">', "<!-- report -->", '<script src="viewer.js"></script>')
    assert [html.count(line) for line in lines] == [1, 1, 1]
