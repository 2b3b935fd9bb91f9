"""``mmrl.sweep``, from a program and from a notebook, with runs that are made up."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import mmrl
from mmrl.commands import child_command

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": {"name": "table", "path": "rows.jsonl"}},
    "algorithm": {"name": "grpo"},
    "trainer": {"steps": 2, "run_dir": "runs/a"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(child_command, "MODULE", "tests.faults.quick_runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def short(rollouts: list[mmrl.Rollout]) -> list[float]:
    """More for short completions."""
    return [-float(len(each.text)) for each in rollouts]


def test_a_sweep_is_a_call_that_goes_on_and_returns_its_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text(json.dumps(CONFIG))
    found = mmrl.sweep("a.yaml", {"learner.lr": [0.001, 0.002]}, {"trainer.steps": 1}, seeds=[0], rewards=short)
    assert found.path == folder / "runs" / "a-sweep"
    assert [row.mean for row in found.table().rows] == pytest.approx([0.021, 0.011])
    assert "lr-0.001_seed-0  done" in capsys.readouterr().out
    again = mmrl.sweep("a.yaml", ["learner.lr=1e-3,2e-3"], {"trainer.steps": 1}, seeds="0-1", rewards=short)
    assert [point.state for point in again.points] == ["done"] * 4
    assert [len(point.run.events) for point in again.points] == [0] * 4
    assert "4 runs: 2 settings x 2 seeds; 2 done, 2 to run" in capsys.readouterr().out
    assert repr(mmrl.load_sweep(found.path)) == repr(again)
    config = json.loads((found.path / "sweep.json").read_text())["config"]
    assert f"{Path(__file__)}:short" in config or f"import:{__name__}:short" in config


def test_errors_of_a_sweep_are_raised(folder: Path) -> None:
    with pytest.raises(mmrl.ConfigError, match=r"learner\.lr should be less than or equal to 1, not 7"):
        mmrl.sweep(CONFIG, {"learner.lr": [0.001, 7]})
    with pytest.raises(mmrl.ConfigError, match="nothing differs between points"):
        mmrl.sweep(CONFIG)
    assert not (folder / "runs").exists()
    with pytest.raises(mmrl.NumericsError, match=r"lr-0\.5_seed-0: the weights are not finite"):
        mmrl.sweep(CONFIG, {"learner.lr": [0.5, 0.001]}, folder="b")
    assert [point.state for point in mmrl.load_sweep("b").points] == ["failed", "done"]


CELLS = [
    """
import mmrl
from mmrl.commands import child_command

child_command.MODULE = "tests.faults.quick_runs"
WORTH = 2.0

def long(rollouts):
    return [WORTH * len(each.text) for each in rollouts]
""",
    """
found = mmrl.sweep(CONFIG, {"learner.lr": [0.001, 0.002]}, seeds=[0, 1], rewards=long)
print(found.table())
""",
]


@pytest.mark.full
def test_a_notebook_sweeps_with_a_function_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    sources = [f"CONFIG = {CONFIG!r}", *CELLS, CELLS[-1]]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    first, again = ("".join(each.text for each in cell.outputs) for cell in notebook.cells[-2:])
    assert "lr-0.002_seed-1  done" in first and "0.002   2/2" in first
    assert "4 done, 0 to run" in again and "started" not in again
    (source,) = (folder / "runs" / "a-sweep" / "given").glob("long-*.py")
    assert "WORTH = 2.0" in source.read_text()
