"""``examples/tiny_model.py``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def test_an_unknown_family_is_answered_with_those_that_there_are(monkeypatch, tmp_path, capsys):
    script = Path(__file__).parents[2] / "examples" / "tiny_model.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "out"), "--family", "qwen9"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "qwen9" in error and "qwen3_5_moe" in error and "internvl" in error
    assert not (tmp_path / "out").exists()
