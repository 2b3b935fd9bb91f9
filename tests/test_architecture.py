"""What mmrl's structure may not grow beyond, and that `tests/architecture.py` counts as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import Structure, circles, floors, structure

ROOT = Path(__file__).resolve().parents[1]
TOO_LONG = 430
LONG_FILES = {
    "datasets/mmrl_datasets/problems.py",
}
"""Files that are too long as yet; none may join them, and one that is short enough is to leave."""
COLUMN_FILES = {"sampler_logprobs": 14, "old_logprobs": 11, "reference_logprobs": 10}
"""Files that may spell each column; a new quantity of a token is to be a row of a table, and not one more trail."""
STEP_PLACES = 1


@pytest.fixture(scope="module")
def ours() -> Structure:
    return structure(ROOT)


def test_rooms_are_few_and_in_order_and_files_are_short(ours: Structure) -> None:
    assert len(ours.rooms) <= 22 and ours.floors <= 10 and len(ours.arrows) <= 130
    assert ours.room_circles == [] and ours.module_circles == []
    too_long = {path for path, lines in ours.long_files.items() if lines > TOO_LONG}
    assert too_long - LONG_FILES == set(), "split it"
    assert LONG_FILES - too_long == set(), "take it from the list"


def test_a_column_is_spelled_in_few_files_and_a_step_is_put_together_in_few_places(ours: Structure) -> None:
    for column, most in COLUMN_FILES.items():
        files = ours.column_files[column]
        assert len(files) <= most, f"let the files that are new read their columns from a table: {files}"
    assert len(ours.step_places) <= STEP_PLACES, f"call the whole step in place of its parts: {ours.step_places}"


def test_columns_count_in_any_word_and_places_by_what_they_import(tmp_path: Path) -> None:
    files = {
        "mmrl/__init__.py": "",
        "mmrl/ops.py": "class A:\n    class B: ...\ndef assign_credit(): ...",
        "mmrl/step/__init__.py": "",
        "mmrl/step/whole.py": "def learn():\n    from mmrl.ops import assign_credit",
        "mmrl/step/user.py": "from mmrl.step.whole import learn",
        "mmrl/README.md": "old_logprobs",
        "plugins/mine/reward.py": '"""Reads needs_old_logprobs."""',
        "tests/test_it.py": "old_logprobs = 1\nfrom mmrl.ops import assign_credit",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = structure(tmp_path)
    assert found.step_places == {"mmrl/step": {"whole.py": ["assign_credit"]}}
    assert found.column_files["old_logprobs"] == ["plugins/mine/reward.py"]
    assert found.classes == 2 and found.room_lines == {"ops": 3, "step": 3}


def test_every_form_of_an_import_is_an_arrow_between_rooms(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from mmrl.top import run",
        "top.py": "def run():\n    from mmrl import middle\n    import mmrl.base",
        "middle/__init__.py": "from ..base import thing",
        "middle/part.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .other import name",
        "middle/other.py": "import json\nfrom mmrl.middle.part import name",
        "base.py": "",
        "base_template/tests/test_it.py": "from mmrl.top import run",
        "base_template/README.md": "",
    }
    for name, text in files.items():
        (tmp_path / "mmrl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mmrl" / name).write_text(text)
    found = structure(tmp_path)
    assert found.rooms == ["base", "middle", "top"] and found.floors == 3
    assert found.arrows == [("middle", "base"), ("top", "base"), ("top", "middle")]
    assert found.room_circles == [] and found.module_circles == [("mmrl.middle.other", "mmrl.middle.part")]
    assert found.lines["mmrl"] == 11


def test_a_circle_is_one_floor() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"d"}}
    assert circles(graph) == [("b", "c")] and floors(graph) == 3
