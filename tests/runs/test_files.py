"""Histories of runs that are read from their end."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import DataError, ResourceError
from mmrl.runs import files
from mmrl.runs.directory import RunDirectory
from mmrl.runs.files import check_records, read_records, read_records_back
from mmrl.runs.reader import Run


def write(path: Path, *records: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return path


@pytest.mark.parametrize("block", [1, 2, 7, 64, 2**16])
@pytest.mark.parametrize("end", ["", '{"step": 2'])
def test_lines_come_from_the_last_one_on_in_blocks_of_any_size(tmp_path, block, end, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_BYTES", block)
    path = tmp_path / "lines.jsonl"
    for count in range(4):
        write(path, *({"step": number, "text": "x" * number * 5} for number in range(count)), end=end)
        found = list(read_records_back(path))
        assert found == list(read_records(path))[::-1] and len(found) == count
    assert list(read_records_back(tmp_path / "none.jsonl")) == []


def test_the_end_of_a_long_history_is_read_alone(tmp_path, monkeypatch):
    broken = '{"step": broken}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text(broken + "".join(json.dumps({"step": n, "attempt": 1, "x": "y" * 99}) + "\n" for n in range(3000)))
    run = RunDirectory(tmp_path)
    assert run.has_steps and run.logged(2999, 1)["x"] and run.logged(3000, 1) is None
    with pytest.raises(DataError, match="is no JSON"):
        run.metrics()
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(DataError, match=r"is no JSON: line 1\n"):
        check_records(path)


def test_a_steps_line_is_the_last_one_of_an_attempt_that_counts(tmp_path):
    lines = [(step, 1) for step in range(6)] + [(step, 2) for step in (3, 4)] + [(4, 3)]
    write(tmp_path / "metrics.jsonl", *({"step": s, "attempt": a, "x": i} for i, (s, a) in enumerate(lines)))
    run = RunDirectory(tmp_path)
    found = {(step, attempt): run.logged(step, attempt) for step in range(7) for attempt in (1, 2, 3)}
    known = {key: None if record is None else record["x"] for key, record in found.items()}
    assert known == {
        **dict.fromkeys(found),
        **{(0, 1): 0, (1, 1): 1, (2, 1): 2, (3, 1): 6, (4, 1): 8, (5, 1): 5},
        **{(3, 2): 6, (4, 2): 8, (4, 3): 8},
    }
    assert run.metrics(["x", "z"]) == {0: {"x": 0}, 1: {"x": 1}, 2: {"x": 2}, 3: {"x": 6}, 4: {"x": 8}, 5: {"x": 5}}


def test_a_run_without_a_finished_step_has_none(tmp_path):
    write(tmp_path / "metrics.jsonl", {"step": 0, "attempt": 1}, {"step": 0, "attempt": 2})
    assert not RunDirectory(tmp_path).has_steps
    write(tmp_path / "metrics.jsonl", {"step": 1, "attempt": 1}, {"step": 0, "attempt": 2})
    assert RunDirectory(tmp_path).has_steps


def test_a_run_starts_while_a_viewer_asks_whether_it_is_live(tmp_path, monkeypatch):
    (tmp_path / files.LOCK).touch()
    asking = (tmp_path / files.LOCK).open("r")
    fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: asking.close())
    with files.locked(tmp_path):
        monkeypatch.undo()
        assert Run(tmp_path).is_live
        with pytest.raises(ResourceError, match="another process is using"):
            files.locked(tmp_path)
    assert not Run(tmp_path).is_live
