"""Errors of given functions name the place where they were written."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.api.capture import reference
from mmrl.api.origins import Origins
from mmrl.errors import PluginError

CELL = """# a reward of a notebook
LIMIT = 2


def short(text):
    return LIMIT / len(text)

class Judge:
    def __call__(self, rollouts):
        return [short(each) for each in rollouts]


def length(rollouts):
    return [short(each) for each in rollouts]
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The definitions of a notebook's cell."""
    name = "/tmp/ipykernel_7/3.py"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), made)
    monkeypatch.setitem(__import__("sys").modules, "__main__", SimpleNamespace(**made))
    code_names = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == name else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=code_names))
    monkeypatch.setitem(__import__("sys").modules, "IPython", shell)
    yield SimpleNamespace(**made)
    del linecache.cache[name]


def test_an_error_names_the_cell_and_its_line_and_not_the_given_file(cell: Any, tmp_path: Path) -> None:
    origins = Origins()
    name = reference("reward", cell.length, tmp_path, origins)
    file = name.rpartition(":")[0]
    lines = Path(file).read_text().splitlines()
    at = {text: lines.index(text) + 1 for text in ("    return LIMIT / len(text)", "def length(rollouts):")}
    division, definition = at.values()
    error = PluginError(
        f"reward {name!r} raised ZeroDivisionError", where=f"rollout 0; {file}:{division} in short", remedy="correct it"
    )
    error.details = f'  File "{file}", line {definition + 1}, in length\n  File "worker.py", line 4, in call'
    found = origins.retold(error)
    assert isinstance(found, PluginError) and found.what == "reward 'length' raised ZeroDivisionError"
    assert found.where == "rollout 0; Cell In[3], line 6 in short" and found.remedy == "correct it"
    assert found.details == '  File "Cell In[3]", line 14, in length\n  File "worker.py", line 4, in call'
    assert origins.told(f"length ({name})") == "length (length of Cell In[3], line 13)"
    assert origins.told(f"{file}:1") == f"{file}:1"  # of a constant


def test_a_class_has_the_place_of_its_methods(cell: Any, tmp_path: Path) -> None:
    origins = Origins()
    assert origins.told(reference("reward", cell.Judge, tmp_path, origins)) == "Judge of Cell In[3], line 8"
