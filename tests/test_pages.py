"""Pages and docstrings: README is short and its config loads; links resolve; tests and keys that are named exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mmrl.config.load import load_config
from mmrl.config.sections import Config
from mmrl.interfaces import Plugin
from mmrl.plugin_host.registry import INTERFACES, create, options_class

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
)
PAGES = [path for path in sorted(LISTED.stdout.splitlines()) if (ROOT / path).exists()]
README = (ROOT / "README.md").read_text()
SECTIONS = ("model", "data", "sampler", "learner", "trainer", "cluster")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", each) is not None for each in found)
        found.add(f"{name}-{repeated}" if repeated else name)
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Links that lead to no file, or to no heading of one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        leads_to_a_file = place.exists() and place.is_relative_to(ROOT)
        if not leads_to_a_file or (anchor and anchor not in anchors(place)):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    assert list(broken_links(ROOT / page)) == []


def test_a_link_to_no_file_or_heading_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(broken_links.__globals__, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A `name`: two\n# One\n# One\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-name-two) [b](other.md#one-1) [c](https://x.org/#y) [d](#here)\n## Here\n")
    assert list(broken_links(page)) == []
    page.write_text("[a](other.md#two) [b](none.md) [c](#there) [d](../..)\n```\n[e](none)\n# There\n```\n")
    assert list(broken_links(page)) == ["other.md#two", "none.md", "#there", "../.."]


def placeholders(text: str) -> list[str]:
    """Words such as RESULTS_X that stand alone in a paragraph, for something that was to be written there."""
    return re.findall(r"(?:^|\n\n)\s*([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\s*(?=\n\n|$)", text.strip("\n"))


@pytest.mark.parametrize("page", PAGES)
def test_no_placeholder_was_left_in_a_page(page: str) -> None:
    assert placeholders((ROOT / page).read_text()) == []


def test_a_placeholder_is_found_alone_and_not_in_a_sentence() -> None:
    text = "# A\n\nRESULTS_X\n\nSet OMP_NUM_THREADS or\nHF_TOKEN\nthere.\n\n`NO_ONE`\n\n  X_TIME  \n\nPNG\n\nLAST_ONE\n"
    assert placeholders(text) == ["RESULTS_X", "X_TIME", "LAST_ONE"]
    assert placeholders("RUN_TIME\n") == ["RUN_TIME"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page.relative_to(ROOT).as_posix())
        for target in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page)):
            place = (page.parent / target).resolve()
            if "://" not in target and place.relative_to(ROOT).as_posix() not in reached:
                waiting.append(place)
    assert set(PAGES) - reached == {"mmrl/plugin_host/template/README.md"}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("page", PAGES)
def test_every_key_of_the_config_that_a_page_names_exists(page: str) -> None:
    text = re.sub(r"^## Coming from .*?(?=^## )", "", prose(ROOT / page), flags=re.DOTALL | re.MULTILINE)
    for word in re.findall(r"`([^`\n]+)`", text):
        for section, key in re.findall(rf"(?<![\w./])({'|'.join(SECTIONS)})\.([a-z]\w*)", word):
            fields = getattr(Config.model_fields[section].annotation, "model_fields", {})
            assert key in fields or key in {"md", "py", "sbatch"}, f"{section}.{key}"


def test_the_readmes_words_of_other_frameworks_lead_to_keys_of_ours() -> None:
    table = README.partition("## Coming from")[2].partition("\n## ")[0]
    ours = [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(ours) > 10
    keys = [key.split(".") for cell in ours for key in re.findall(r"`([a-z_.]+)`", cell.partition("(")[0])]
    algorithm = {*options_class("algorithm", "grpo").model_fields, "name"}
    for first, *rest in keys:
        section = getattr(Config.model_fields[first].annotation, "model_fields", {})
        known = algorithm if first == "algorithm" else section
        assert not rest or rest[0] in known, (first, rest)


def test_the_readmes_config_for_ones_own_data_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads with every plugin's options, and its dataset reads the row that the README shows."""
    section = README.partition("## Your own data\n")[2].partition("\n## ")[0]
    (config,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (row,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    assert len(config.splitlines()) <= 20 and set(yaml.safe_load(config)) >= {"model", "data", "rewards", "algorithm"}
    (tmp_path / "mine.yaml").write_text(config)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(row)
    for path in map(Path, json.loads(row)["images"]):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (56, 56)).save(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    loaded = load_config([tmp_path / "mine.yaml"], options_class=options_class).config
    (prompt,) = create("dataset", loaded.data.train).load()
    assert prompt.answer == "3" and len(prompt.images) == 1


def test_every_fault_has_a_test_that_exists() -> None:
    """The table has a row for each of the 45 faults, and each names at least one test."""
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (TESTS / "FAULTS.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 46))
    for number, tests in rows:
        assert list(named_tests(tests)), f"row {number} names no test"
    assert f"[{len(rows)} kinds of faults]" in README


def test_every_rule_of_trust_has_a_test_that_exists() -> None:
    rows = (TESTS / "TRUST.md").read_text().partition("|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) > 10
    for row in rows:
        tests = row.strip("| ").rpartition(" | ")[2]
        assert list(named_tests(tests.replace("`tests/", "`"), file="test_trust.py")), row


def named_tests(cell: str, file: str = "") -> Iterator[str]:
    """The tests that a table's cell names, as ``file.py::function``, ``::function`` or a file; each must exist."""
    for name, function in re.findall(r"`([\w/]+\.py)?(?:::)?(test_\w+)?`", cell):
        file = name or file
        text = (TESTS / file).read_text()
        assert f"def {function}(" in text if function else text, f"{file}::{function}"
        yield f"{file}::{function}"


HALF_SENTENCE = re.compile(r"\s*(?:\w+: )?(?:What|Whether|Of)\s")


def half_sentences(path: Path) -> Iterator[int]:
    """Lines of a module's docstrings that begin with What, Whether or Of, as a line's or an attribute's first word."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if re.search(r"\b(?:What|Whether|Of)\s", text) else ():
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                lines = docstring.splitlines()
                yield from (node.lineno + i for i, line in enumerate(lines) if HALF_SENTENCE.match(line))


def test_docstrings_begin_with_what_a_thing_is_or_does() -> None:
    """``True if`` and a noun instead of ``Whether`` and ``Of``; the message lists every line."""
    paths = [path for folder in ("mmrl", "plugins", "datasets") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in half_sentences(path)] == []


def test_a_half_sentence_is_found_and_a_sentence_is_not(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        '"""Whether.\n\nWhether it may.\n\n    a: Of the row.\n    b: The row\'s, of which.\n"""\nx = "Of"\n'
    )
    assert list(half_sentences(tmp_path / "m.py")) == [3, 5]


def test_the_map_of_hooks_has_each_method_of_each_kind_and_marks_those_that_must_be_written() -> None:
    table = (ROOT / "plugins/README.md").read_text().partition("## Every hook")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    told, kinds = dict[str, dict[str, bool]](), list[str]()
    for first, hooks, *_ in rows[1:]:
        kinds = [kind for kind in first.split(", ") if kind] or kinds
        for kind in kinds:
            found = re.findall(r"(\*\*)?`(\w+)`", hooks)
            told.setdefault(kind, {}).update({name: bool(bold) for bold, name in found})
    known = {"all": Plugin} | INTERFACES
    assert told.keys() == known.keys()
    for kind, interface in known.items():
        inherited = set() if interface is Plugin else set(vars(Plugin))
        own = {name for name, each in vars(interface).items() if callable(each) or isinstance(each, property)}
        hooks = {name for name in own - inherited if not name.startswith("_") and name != "Config"}
        assert told[kind].keys() == hooks, kind
        must = set(interface.__abstractmethods__) | ({"score", "score_one"} if kind == "reward" else set())
        assert {name for name, bold in told[kind].items() if bold} == must, kind


def test_the_page_on_time_has_the_versions_of_the_schedule() -> None:
    """Derived from the slots: a batch has the weights that the step which opens its slot begins with."""
    from mmrl.step.schedule import Schedule

    rows = re.findall(
        r"^\| `trainer\.staleness: (\d)` \| ([\d |]+) \|$", (ROOT / "mmrl/step/README.md").read_text(), re.M
    )
    assert [int(lag) for lag, _ in rows] == [0, 1, 2, 4]
    for lag, cells in rows:
        schedule = Schedule(int(lag), steps=100)
        told = [int(cell) for cell in cells.split("|")]
        opened = [next(step for step in range(1, 99) if schedule.last_open(step) >= batch) for batch in range(1, 8)]
        assert told == [step - 1 for step in opened], lag
