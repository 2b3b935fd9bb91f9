"""A report: what it holds, what it leaves out and says so, and that nothing of a run gets out of its data."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.commands.cli import main
from mmrl.errors import ConfigError, DataError
from mmrl.viewer.pages import Pages
from mmrl.viewer.report import PageReport, make_report, spread
from tests.viewer.made_run import HOSTILE, make_run
from tests.viewer.made_sweep import make_large_sweep, make_sweep

EVALUATIONS = [
    "answers of 1 of 2 evaluations: the last one is inside",
    "answers of 1 of 2 evaluations with blank pictures: the last one is inside",
]


class Elements(HTMLParser):
    """The elements of a page, and the text within each script and style, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.within: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.within:
            self.within[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:  # within a script or style
            self.within[self.cdata_elem][-1] += data


@dataclass
class Opened:
    text: str

    @property
    def data(self) -> dict[str, Any]:
        (found,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', self.text, re.DOTALL)
        read: dict[str, Any] = json.loads(found)
        return read


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def whole(run: Path) -> Opened:
    return Opened(make_report([run]).html())


def test_it_holds_the_documents_that_the_server_answers(run: Path, whole: Opened) -> None:
    pages, documents = Pages([run], is_sent=True), whole.data["documents"]
    steps = [f"run/0/step/{step}" for step in (1, 2)] + ["run/0/evaluation/2", "run/0/blank/2"]
    groups = [
        f"{step}/group/{group}" for step, count in zip(steps, (5, 5, 3, 3), strict=True) for group in range(count)
    ]
    history = [
        "runs",
        "run/0",
        *(f"run/0/{name}" for name in ("metrics", "timeline", "events", "evaluations", "ledger")),
    ]
    assert set(documents) == {*history, *steps, *groups}
    for resource, document in documents.items():
        assert document == json.loads(json.dumps(pages.document(resource))), resource
    assert documents["run/0"]["path"] == documents["runs"][0]["path"] == "run" and str(run.parent) not in whole.text
    assert whole.data["left_out"] == EVALUATIONS and re.match(r"20\d\d-\d\d-\d\d", whole.data["made"])


def test_its_pictures_are_those_of_its_groups(run: Path, whole: Opened) -> None:
    shown = set(re.findall(r'"hash":"([0-9a-f]{64})"', whole.text))
    assert set(whole.data["media"]) == shown and len(shown) == 11
    for name, uri in whole.data["media"].items():
        kind, _, data = uri.partition(";base64,")
        assert kind == "data:image/png" and base64.b64decode(data) == (run / "media" / f"{name}.png").read_bytes()


def test_only_its_own_script_may_run(whole: Opened) -> None:
    elements = Elements(whole.text)
    (policy,) = [each["content"] for tag, each in elements.found if each.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(part.strip().split(" ", 1) for part in str(policy).split(";"))
    scripts = [text for text in elements.within["script"] if not text.startswith('{"documents"')]
    assert len(scripts) == 1 and len(elements.within["style"]) == 1 and len(elements.within["script"]) == 2

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": hashed(scripts[0]),
        "style-src": hashed(elements.within["style"][0]),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    first = [tag for tag, _ in elements.found].index("meta")
    assert elements.found[first + 1][1].get("http-equiv") == "Content-Security-Policy"  # before anything that loads
    assert not any("src" in each for _, each in elements.found)
    assert [each["href"] for tag, each in elements.found if tag == "link"] == ["data:,"]


def test_no_text_of_a_run_leaves_the_data(whole: Opened) -> None:
    start = whole.text.index('id="report">') + len('id="report">')
    data = whole.text[start : whole.text.index("</script>", start)]
    assert data.isascii() and "<" not in data and "\n" not in data
    assert "\\u2028" in data and "\\u2029" in data and "\\ud800" in data
    members = json.loads(data)["documents"]["run/0/step/1/group/1"]["members"]
    assert members[0]["text"] == HOSTILE
    assert "img" not in {tag for tag, _ in Elements(whole.text).found}


def test_it_is_no_larger_than_it_may_be_and_says_what_it_leaves_out(run: Path, whole: Opened) -> None:
    size = len(whole.text.encode())
    sizes, held = [], []
    for limit in np.linspace(0.66, 1.05, 12):
        report = make_report([run], max_mb=size * limit / 1e6)
        text = report.html()
        sizes.append(len(text.encode()) / (size * limit))
        held.append(len(report.documents))
        data = Opened(text).data
        assert data["left_out"] == report.left_out and (report.left_out or len(report.documents) == 27)
        groups = sum("/group/" in name for name in data["documents"])
        told = sum(int(number) for each in report.left_out for number in re.findall(r"(\d+) of \d+ groups", each))
        tables = sum("its table" in each for each in report.left_out)
        assert groups + told == 16 or tables
    assert max(sizes) <= 1 and held[0] < held[6] < held[-1] == len(whole.data["documents"]) == 27
    with pytest.raises(ConfigError, match="no room for the run"):
        make_report([run], max_mb=0.05)


def test_each_step_shows_some_groups_before_one_shows_all(run: Path, whole: Opened) -> None:
    documents = make_report([run], max_mb=len(whole.text.encode()) * 0.86 / 1e6).documents
    groups = [name.split("/")[3] for name in documents if "/group/" in name and "/step/" in name]
    counts = {step: groups.count(step) for step in ("1", "2")}
    assert min(counts.values()) >= 1 and max(counts.values()) < 5 and abs(counts["1"] - counts["2"]) <= 1


def test_steps_may_be_chosen(run: Path) -> None:
    report = make_report([run], [2])
    assert [name for name in report.documents if re.fullmatch(r"run/0/step/\d+", name)] == ["run/0/step/2"]
    assert report.left_out == ["rollouts of 1 of 2 recorded steps (inside: 2); --step N chooses", *EVALUATIONS]
    with pytest.raises(DataError, match="no rollouts of step 3") as caught:
        make_report([run], [2, 3])
    assert caught.value.possible == "1, 2"


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ([], []),
        ([4], [4]),
        ([1, 2], [1, 2]),
        (range(1, 9), range(1, 9)),
        (range(1, 72), [1, 11, 21, 31, 41, 51, 61, 71]),
    ],
)
def test_the_first_the_last_and_some_between_are_shown_by_default(known: Any, chosen: Any) -> None:
    assert spread(list(known)) == list(chosen)


def test_large_pictures_are_thumbnails_and_damaged_ones_are_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = sorted(file.stem for file in (run / "media").glob("*.png"))
    noise = np.random.default_rng(0).integers(0, 255, (300, 600, 3), np.uint8)
    Image.fromarray(noise).save(run / "media" / f"{names[0]}.png")
    (run / "media" / f"{names[1]}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    (run / "media" / f"{names[2]}.png").unlink()
    (run / "media" / f"{names[3]}.png").write_bytes(b"<svg onload=alert(1)>" * 900)
    whole = (run / "media" / f"{names[0]}.png").read_bytes()
    chunk = whole.index(b"IDAT", whole.index(b"IDAT") + 4)
    (run / "media" / f"{names[4]}.png").write_bytes(whole[:chunk] + b"\xff" * 4 + whole[chunk + 4 :])
    report = make_report([run])
    shown = {name: uri for name, uri in report.media.items() if name in names[:5]}
    (uri,) = [uri for name, uri in shown.items() if name == names[0]]
    assert uri.startswith("data:image/jpeg;base64,")
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert image.size == (256, 128)
    assert set(shown) == {names[0]}
    assert "large pictures: they have at most 256 pixels a side here" in report.left_out


def test_the_command_writes_the_file_and_says_what_it_leaves_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.html"
    assert main(["report", str(run), "-o", str(file)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "-o", str(file), "--step", "1"]) == 0  # replaces the earlier one
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{file}: 0.") and said[1] == (
        "it leaves out: rollouts of 1 of 2 recorded steps (inside: 1); --step N chooses"
    )
    assert set(Opened(file.read_text()).data["documents"]) >= {"run/0/step/1", "run/0/metrics"}


def test_steps_whose_table_finds_no_room_are_not_said_to_be_inside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = PageReport.add
    monkeypatch.setattr(PageReport, "add", lambda self, name, *rest: name != "run/0/step/2" and add(self, name, *rest))
    left_out = make_report([run], [1, 2]).left_out
    assert "step 2: its table is larger than the room that was left" in left_out
    assert "rollouts of 1 of 2 recorded steps (inside: 1); --step N chooses" in left_out


def test_steps_and_groups_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("rollouts/step-000001", "evaluations/step-000002"):
        (run / f"{name}.parquet").write_bytes(b"PAR1 and then nothing")
    left_out = make_report([run]).left_out
    assert [each.partition(":")[0] for each in left_out[:2]] == ["step 1", "evaluation 2"]
    assert "no record of a rollout" in left_out[0] and "rollouts of 1 of 2 recorded steps (inside: 2)" in left_out[2]
    document = Pages.document

    def damaged(self: Pages, resource: str) -> Any:
        return {"problem": "its page is damaged\nat 3"} if "step/2/group" in resource else document(self, resource)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pages, "document", damaged)
        assert "step 2 has groups that cannot be read: its page is damaged" in make_report([run]).left_out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{run}", "--step", "7"], 2, "no record of step 7"),
        (["{run}", "--max-mb", "0"], 2, "no size of a report"),
        (["{run}", "--max-mb", "0.01"], 2, "no room for the run"),
        (["{run}", "-o", "{folder}/missing/report.html"], 2, "a folder that exists"),
        (["{run}", "-o", "{folder}"], 2, "cannot be a file"),
        (["{run}", "-o", "{run}/config.yaml"], 2, "is a file that is no report"),
        (["{run}", "-o", "/dev/null"], 2, "cannot be a file"),
        (["{folder}"], 2, "there is no run"),
    ],
)
def test_what_the_command_cannot_do(
    words: list[str], code: int, said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(word.format(run=run, folder=tmp_path) for word in words)]) == code
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


# ---- Several runs


@pytest.fixture(scope="module")
def two(runs: tuple[Path, Path]) -> Opened:
    return Opened(make_report(runs).html())


def test_a_report_of_several_runs_holds_the_list_and_each_runs_pages(runs: tuple[Path, Path], two: Opened) -> None:
    pages, documents = Pages(runs, is_sent=True), two.data["documents"]
    assert {"runs", "overview"} <= set(documents)
    for number in (0, 1):
        held = {name.partition(f"run/{number}")[2] for name in documents if name.startswith(f"run/{number}")}
        assert {"", "/metrics", "/events", "/evaluations", "/ledger", "/step/1", "/step/2", "/evaluation/2"} <= held
        assert sum("/group/" in name for name in held) == 16
    for resource, document in documents.items():
        assert document == json.loads(json.dumps(pages.document(resource))), resource
    assert two.data["left_out"] == [f"{name}: {'; '.join(EVALUATIONS)}" for name in ("shapes", "shapes-again")]
    assert str(runs[0].parent) not in two.text


@pytest.mark.full
def test_several_runs_share_the_room_and_each_says_what_it_lacks(runs: tuple[Path, Path], two: Opened) -> None:
    size, data = len(two.text.encode()), len(json.dumps(two.data, separators=(",", ":")))
    shares = []
    for share in (0.5, 0.8):
        limit = size - data * (1 - share)
        report = make_report(runs, max_mb=limit / 1e6)
        assert len(report.html().encode()) <= limit
        held = [sum(name.startswith(f"run/{number}/") for name in report.documents) for number in (0, 1)]
        shares.append(min(held) / max(held))
        assert all(f"run/{number}/metrics" in report.documents for number in (0, 1))
        told = "\n".join(report.left_out)
        assert re.search("^shapes: ", told, re.MULTILINE) and re.search("^shapes-again: ", told, re.MULTILINE)
        for number, name in enumerate(("shapes", "shapes-again")):
            (sentence,) = [each for each in report.left_out if each.startswith(f"{name}: ")]
            inside = [step for step in (1, 2) if f"run/{number}/step/{step}" in report.documents]
            assert (len(inside) == 2) != (f"rollouts of {2 - len(inside)} of 2 recorded steps" in sentence)
            groups = sum("/group/" in resource for resource in report.documents if f"run/{number}/" in resource)
            tables = (kind for kind in ("step/1", "step/2", "evaluation/2", "blank/2"))
            there = sum(5 if "step" in each else 3 for each in tables if f"run/{number}/{each}" in report.documents)
            assert (groups == there) != (f"{there - groups} of {there} groups of the tables inside" in sentence)
    assert min(shares) > 0.5


def test_a_sweep_is_reported_as_its_runs_with_thinner_curves_where_room_is_short(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "rates")
    report = make_report([sweep])
    assert [name for name in report.documents if name.endswith("/metrics")] == [f"run/{n}/metrics" for n in range(5)]
    assert report.left_out == ["lr0.01-s2: this point of the sweep has not begun"]
    large = make_large_sweep(tmp_path / "large", settings=3, steps=200, metrics=20)
    limit = len(make_report([large]).html()) * 0.6
    thin = make_report([large], max_mb=limit / 1e6)
    assert len(thin.html()) <= limit and "curves: one step of" in thin.left_out[0]
    assert all(thin.documents[f"run/{number}/metrics"]["steps"][-1] == 200 for number in range(9))


def test_runs_that_find_no_room_are_told(tmp_path: Path) -> None:
    large = make_large_sweep(tmp_path / "large", settings=4, steps=2, metrics=2)
    whole = make_report([large])
    size, own = len(whole.html()), len(json.dumps(whole.documents["run/0"]))
    data = len(json.dumps(whole.documents, separators=(",", ":")))
    sentences = 2000 * 12  # whose room is kept free
    first = sum(len(json.dumps(whole.documents[name])) for name in ("runs", "overview"))
    report = make_report([large], max_mb=(size - data + sentences + first + 5.5 * own) / 1e6)
    held = [name for name in report.documents if re.fullmatch(r"run/\d+", name)]
    assert 2 < len(held) < 8
    assert f"{12 - len(held)} of 12 runs, which did not fit; --max-mb makes room" in report.left_out


def test_one_of_several_runs_that_cannot_be_read_is_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.html"
    assert main(["report", str(run), str(tmp_path / "nothing"), "-o", str(file), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert "it leaves out: nothing: there is no run" in said and str(tmp_path / "nothing") not in said
    assert "run: rollouts of 1 of 2 recorded steps (inside: 2); --step N chooses; answers of 1 of 2" in said
    assert "run/0/step/2" in Opened(file.read_text()).data["documents"]
    assert main(["report", str(run), str(run), "-o", str(file), "--step", "7"]) == 2
    assert "no record of step 7" in capsys.readouterr().err
