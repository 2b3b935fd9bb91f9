from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import datasets
from mmrl.errors import DataError
from mmrl_datasets import digits, shapes
from mmrl_datasets.digits import write_digits
from mmrl_datasets.shapes import COLOURS, write_shapes
from mmrl_datasets.table import Table


def rows(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return read


def pixels(row: dict[str, Any]) -> Any:
    (image,) = row["images"]
    return np.asarray(Image.open(io.BytesIO(image["bytes"])))


def halves(row: dict[str, Any]) -> list[Any]:
    """The digits of a row, drawn down to 8x8 again."""
    image = pixels(row)
    parts = np.split(image, image.shape[1] // image.shape[0], axis=1)
    return [np.asarray(Image.fromarray(p).convert("L").resize((8, 8), Image.Resampling.BICUBIC)) for p in parts]


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def digit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder, train=200, test=60, warmup=50, pairs=0.5, seed=1)
    return folder


@pytest.fixture(scope="module")
def shape_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, train=300, test=60, warmup=40, seed=1)
    return folder


def test_the_answers_are_those_of_the_digits_shown(digit_folder: Path) -> None:
    source = load_digits()
    model = KNeighborsClassifier(1).fit(255 - source.images.reshape(-1, 64) * (255 / 16), source.target)
    read = rows(digit_folder / "train.parquet")
    assert len(read) == 200
    assert sum(pixels(row).shape == (56, 112, 3) for row in read) == 100
    right = [sum(model.predict([half.ravel() for half in halves(row)])) == int(row["answer"]) for row in read]
    assert np.mean(right) > 0.98
    for row in read:
        asked = "What is the sum of the two digits?" if pixels(row).shape[1] == 112 else "What digit is this?"
        assert row["problem"] == f"<image>{asked}"
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def test_no_digit_of_a_test_row_is_trained_on(digit_folder: Path) -> None:
    shown = {
        split: {half.tobytes() for row in rows(digit_folder / f"{split}.parquet") for half in halves(row)}
        for split in ("train", "test", "warmup")
    }
    assert len(shown["test"]) > 80
    assert not shown["test"] & (shown["train"] | shown["warmup"])


def test_every_training_digit_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    write_digits(tmp_path, train=1438, test=359)
    read = [row["images"][0]["bytes"] for split in ("train", "test") for row in rows(tmp_path / f"{split}.parquet")]
    assert len(set(read)) == 1797
    assert not (tmp_path / "warmup.parquet").exists()
    with pytest.raises(DataError, match="1439 rows of one digit are more than the 1438 digits"):
        write_digits(tmp_path / "more", train=1439)


def test_the_counts_are_those_of_the_shapes_drawn(shape_folder: Path) -> None:
    from scipy.ndimage import label

    read = rows(shape_folder / "train.parquet")
    assert len({pixels(row).shape for row in read}) == 5
    for row in read:
        asked = re.fullmatch(r"<image>How many (\w+) (circle|square|triangle)s are there\?", row["problem"])
        assert asked is not None
        of_colour = np.abs(pixels(row).astype(int) - COLOURS[asked[1]]).sum(-1) < 40
        areas, num_areas = label(of_colour)
        found = [measure(areas == area) for area in range(1, num_areas + 1)]
        assert str(found.count(asked[2])) == row["answer"], row["problem"]
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def measure(area: Any) -> str:
    """The kind of a filled area, from how much of its bounding box it fills."""
    ys, xs = np.nonzero(area)
    if len(ys) < 60:
        return "edge of another colour"
    fill = len(ys) / ((np.ptp(ys) + 1) * (np.ptp(xs) + 1))
    return "square" if fill > 0.92 else "circle" if fill > 0.68 else "triangle"


def test_answers_are_spread_and_zero_occurs(shape_folder: Path) -> None:
    answers = [row["answer"] for row in rows(shape_folder / "train.parquet")]
    assert set(answers) == {"0", "1", "2", "3", "4"}
    assert max(answers.count(a) for a in set(answers)) < 0.3 * len(answers)


def test_no_scene_is_in_two_splits(shape_folder: Path) -> None:
    scenes = {
        s: {r["images"][0]["bytes"] for r in rows(shape_folder / f"{s}.parquet")} for s in ("train", "test", "warmup")
    }
    assert [len(scenes[s]) for s in ("train", "test", "warmup")] == [300, 60, 40]
    assert len(set.union(*scenes.values())) == 400


@pytest.mark.parametrize("write", [write_digits, write_shapes])
def test_the_same_seed_gives_the_same_files_and_another_is_not_written_over_them(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "a", train=20, test=10, seed=3)
    write(tmp_path / "b", train=20, test=10, seed=3)
    before = file_hashes(tmp_path / "a")
    assert before == file_hashes(tmp_path / "b")
    assert set(before) == {"train.parquet", "test.parquet"}
    write(tmp_path / "a", train=20, test=10, seed=3)
    with pytest.raises(DataError, match="holds other rows"):
        write(tmp_path / "a", train=20, test=10, seed=4)
    assert file_hashes(tmp_path / "a") == before
    write(tmp_path / "c", train=30, test=10, seed=3)
    assert file_hashes(tmp_path / "c")["test.parquet"] == before["test.parquet"]


def test_an_interrupted_file_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="holds other rows"):
        write_digits(tmp_path, train=5, test=5)


def test_the_table_loader_reads_what_the_generators_write(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    prompts = Table(Table.Config(path=str(digit_folder), split="test")).load()
    assert len(prompts) == 60
    assert prompts[0].id == "test/0"
    assert prompts[0].demonstration == f"\\boxed{{{prompts[0].answer}}}"
    assert len(prompts[0].images) == 1


@pytest.mark.parametrize("module", ["digits", "shapes"])
def test_the_generators_are_commands(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-m", f"mmrl_datasets.{module}", str(tmp_path / "out"), "--train", "4", "--test", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows(tmp_path / "out" / "train.parquet")) == 4


@pytest.mark.parametrize("main", [digits.main, shapes.main])
def test_bad_options_exit_with_the_code_for_data(tmp_path: Path, main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--train", "-1"]) == 3
    assert "0 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
