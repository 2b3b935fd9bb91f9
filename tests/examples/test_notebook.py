"""The notebook of the examples, run as a user would, with the real engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import mmrl

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells train twice what they say, and the second time there is nothing to do."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (training,) = [source for source in cells if "mmrl.train(" in source]
    notebook.cells.append(nbformat.v4.new_code_cell(training + "\nassert run.metrics.steps"))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output for output in shown) == 5  # a row's, and four rollouts'
    assert "is finished" in shown[-2] + shown[-1]
    run = mmrl.load_run(tmp_path / "runs" / "first_run" / "run")
    curve = list(run.metrics.curve("reward/mean").values())
    assert len(curve) == 8 and curve[-1] > curve[0]
    assert run.policy_path.is_dir() and (tmp_path / "runs" / "first_run" / "exported" / "config.json").exists()
