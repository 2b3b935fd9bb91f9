"""A hub on the loopback, and what its users have set."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.hub_server import SIGNATURE, TOKEN, Hub, serving


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty hub."""
    with serving() as server:
        yield server


@pytest.fixture
def sums() -> Callable[[Iterable[int]], dict[str, bytes]]:
    """The files of a dataset, one row for each number; the answer is its double."""

    def write(numbers: Iterable[int]) -> dict[str, bytes]:
        from pyarrow import Table, parquet

        buffer = io.BytesIO()
        rows = [{"problem": f"what is {n}+{n}?", "answer": str(2 * n)} for n in numbers]
        parquet.write_table(Table.from_pylist(rows), buffer)
        return {"README.md": b"# sums", "data/train-00000-of-00001.parquet": buffer.getvalue()}

    return write


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME of the user's commands."""
    return tmp_path / "hf"


@pytest.fixture
def environment(hub: Hub, home: Path) -> dict[str, str]:
    """The user's environment variables, the hub's address and a token among them."""
    kept = ("PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
    }


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with the user's environment and the variables given by name; no output may hold a secret."""

    def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert not [secret for secret in (TOKEN, SIGNATURE) if secret in done.stdout + done.stderr]
        return done

    return run
