"""What mmrl's structure may not grow beyond, and that `tests/architecture.py` counts as it says."""

from __future__ import annotations

from pathlib import Path

from tests.architecture import circles, floors, structure

ROOT = Path(__file__).resolve().parents[1]
TOO_LONG = 430
LONG_FILES = {
    "datasets/mmrl_datasets/problems.py",
}
"""Files that are too long as yet; none may join them, and one that is short enough is to leave."""


def test_rooms_are_few_and_in_order_and_files_are_short() -> None:
    found = structure(ROOT)
    assert len(found.rooms) <= 22 and found.floors <= 10 and len(found.arrows) <= 130
    assert found.room_circles == [] and found.module_circles == []
    too_long = {path for path, lines in found.long_files.items() if lines > TOO_LONG}
    assert too_long - LONG_FILES == set(), "split it"
    assert LONG_FILES - too_long == set(), "take it from the list"


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
