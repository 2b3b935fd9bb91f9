"""Runs of more rows than ``data.scan_rows``: each row is measured when it is reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.data.ahead import AHEAD
from tests.faults.runs import Killed, Runs, at, events, fake, outcome, records, stop

ROWS = 60
BAD = (3, 17, 18, 19, 41, 55)
"""Rows without an answer."""


def write_rows(runs: Runs, num_rows: int = ROWS, column: str = "answer") -> None:
    """Rows of which none is too long, and some lack the column."""
    runs.write_rows(range(num_rows))
    rows = [json.loads(line) for line in runs.rows.read_text().splitlines()]
    rows = [row | {"prompt": "one plus " * (number % 8 + 1)} for number, row in enumerate(rows)]
    rows = [row | {column: None} if number in BAD else row for number, row in enumerate(rows)]
    runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(runs: Runs, name: str = "run", **data: Any) -> Path:
    """Nine steps of eight prompts: the second epoch begins in the seventh."""
    rows = {"name": "table", "path": str(runs.rows)}
    data = {"train": rows, "scan_rows": 50, "max_bad_rows": 0.2, "max_prompt_tokens": 125} | data
    return runs.config(name, data=data, trainer={"steps": 9, "prompts_per_step": 8, "keep_checkpoints": 99})


def samples(run: Path) -> list[str]:
    return [name for record in outcome(run)["ledger"] for _, name, member in record["samples"] if member == 0]


@pytest.mark.parametrize("way", ["killed", pytest.param("stopped", marks=pytest.mark.full)])
def test_a_run_measured_ahead_and_cut_at_every_step_comes_out_as_the_unbroken_one(fake_runs: Runs, way, capsys):
    write_rows(fake_runs)
    assert fake_runs.train(config(fake_runs, "plain")) == 0
    out = capsys.readouterr().out
    assert "train      60 rows; each is measured when it is reached (data.scan_rows is 50)\n" in out
    cuts = {"killed": lambda: at("checkpoint.renamed", 1), "stopped": lambda: at("save.shard", 1, stop)}
    for _ in range(12):
        try:
            with cuts[way]():
                fake_runs.train(config(fake_runs))
        except Killed:
            continue
        except LookupError:  # it is finished
            break
    plain, run = fake_runs.folder / "plain", fake_runs.folder / "run"
    expected, found = outcome(plain), outcome(run)
    for part in expected:
        assert found[part] == expected[part], part
    assert all(len(record["samples"]) == 8 * 4 for record in expected["ledger"]), "each step has all of its prompts"
    reached = expected["trainer"]["rows_reached"]
    assert reached[1]["reached"] == expected["trainer"]["consumed_prompts"] == reached[0]["usable"] + 7
    assert reached[1]["causes"] == {"Column 'answer' is null": 7}
    assert {f"train/{number}" for number in BAD}.isdisjoint(samples(plain))
    dropped = [event["prompt"] for event in events(plain, "dropped")]
    assert sorted(dropped, key=int) == sorted(map(str, BAD), key=int), "once each, though one is reached twice"
    assert "each is measured when it is reached" in json.loads((run / "environment.json").read_text())["rows"]


@pytest.mark.full
def test_a_run_goes_on_in_the_way_that_it_began(fake_runs: Runs, capsys):
    write_rows(fake_runs)
    for name, most, later in (("ahead", 50, 100), ("scanned", 60, 10)):
        assert fake_runs.train(config(fake_runs, f"{name}-plain", scan_rows=most)) == 0
        fake_runs.killed(config(fake_runs, name, scan_rows=most), "fake.update", 4)
        capsys.readouterr()
        assert fake_runs.train(config(fake_runs, name, scan_rows=later)) == 0
        out = capsys.readouterr().out
        assert f"changed: data.scan_rows: {most} -> {later}" in out and "60 rows; " in out
        assert "(as when the run began)" in out
        expected, found = (outcome(fake_runs.folder / each) for each in (f"{name}-plain", name))
        assert found == expected
    scanned, ahead = samples(fake_runs.folder / "scanned"), samples(fake_runs.folder / "ahead")
    assert scanned != ahead and "60 rows; all were measured at the start" in out


def test_a_run_of_epochs_counts_all_rows(fake_runs: Runs):
    write_rows(fake_runs)
    path = config(fake_runs)
    options = json.loads(path.read_text())
    options["trainer"] |= {"steps": None, "epochs": 0.5}
    path.write_text(json.dumps(options))
    assert fake_runs.train(path) == 0
    assert [record["step"] for record in records(fake_runs.folder / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert fake_runs.train(path) == 0  # finished, and its rows are counted as before


def test_fewer_rows_than_a_step_needs_are_told_without_their_lengths(fake_runs: Runs, capsys):
    write_rows(fake_runs, 7)
    assert fake_runs.train(config(fake_runs, scan_rows=6)) == 3
    error = capsys.readouterr().err
    assert "7 rows, trainer.prompts_per_step asks for 8" in error and "no rows" not in error


def test_images_that_the_model_does_not_read_are_named_as_such(fake_runs: Runs, picture, capsys):
    (fake_runs.folder / "image.png").write_bytes(picture(56, 56).data)
    rows = [{"prompt": f"Which is {n}?", "answer": "1", "images": ["image.png"] * (n == 0)} for n in range(12)]
    fake_runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fake_runs.train(config(fake_runs, scan_rows=6)) == 0
    (event,) = events(fake_runs.folder / "run", "dropped")
    assert event["reason"].startswith("the row has images, and the model reads text only")


def test_other_files_are_refused(fake_runs: Runs, capsys):
    write_rows(fake_runs)
    fake_runs.killed(config(fake_runs), "fake.update", 4)
    write_rows(fake_runs, 59)
    assert fake_runs.train(config(fake_runs)) == 2
    error = capsys.readouterr().err
    assert f"data.train: {AHEAD}" in error and "--allow-change data.train" in error
    write_rows(fake_runs)
    assert fake_runs.train(config(fake_runs, max_prompt_tokens=100)) == 2
    assert fake_runs.train(config(fake_runs)) == 0


def test_too_many_bad_rows_end_the_run_when_they_are_reached(fake_runs: Runs, capsys):
    write_rows(fake_runs)
    assert fake_runs.train(config(fake_runs, max_bad_rows=0.05)) == 3
    error = capsys.readouterr().err
    assert "4 of " in error and "rows cannot be used, more than data.max_bad_rows = 0.05" in error
    assert any(record["step"] for record in records(fake_runs.folder / "run" / "metrics.jsonl")), "not at its start"


def test_demonstrations_that_are_missing_are_bad_rows(fake_runs: Runs):
    write_rows(fake_runs, column="written")
    data = {"name": "table", "path": str(fake_runs.rows), "demonstration": "written"}
    options = {"algorithm": {"name": "sft"}, "rewards": []}
    path = config(fake_runs, train=data)
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    assert fake_runs.train(path) == 0
    assert len(events(fake_runs.folder / "run", "dropped")) == len(BAD)


def test_a_model_that_reads_images_must_know_how_many(models, picture, tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"problem": f"Which is {n}?", "images": [{"bytes": picture(56, 56, n).data, "path": None}] * (1 + (n == 5)),
         "answer": str(n)}
        for n in range(12)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=5)
    data = {"train": {"name": "table", "path": str(tmp_path / "rows.parquet")}, "scan_rows": 11, "max_bad_rows": 0.1}
    with fake(tmp_path, models("qwen2_5_vl")) as runs:
        assert runs.train(runs.config(data=data)) == 2
        error = capsys.readouterr().err
        assert "data.max_images is not set, and 12 training rows are not read before the run starts" in error
        assert "data.scan_rows: 12 for a new run" in error
        assert runs.train(runs.config(data=data | {"max_images": 1}, trainer={"steps": 5})) == 0
        reason = "The row has 2 images, more than data.max_images = 1"
        assert [event["reason"] for event in events(tmp_path / "run", "dropped")] == [reason]
        assert runs.train(runs.config("scanned", data=data | {"scan_rows": 12})) == 0


@pytest.mark.slow
def test_a_million_rows_with_images_begin_within_seconds_and_below_a_gigabyte(tmp_path):
    from tests.benchmarks.many_rows import measure, write

    write(tmp_path / "rows.parquet", 1_000_000)
    found = measure(tmp_path, 1_000_000, scan_rows=100_000)
    assert found.first_step_s < 10 and found.most_bytes < 1e9, found
