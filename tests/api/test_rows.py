"""Rows of this process, written so that a loader reads them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from mmrl.api.rows import write_rows
from mmrl.config.plugin_specs import DatasetSpec
from mmrl.errors import ConfigError, DataError
from mmrl.plugin_host.registry import create


def test_images_in_every_form_are_read_as_they_were(tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    (tmp_path / "picture.png").write_bytes(buffer.getvalue())
    forms = [picture, buffer.getvalue(), tmp_path / "picture.png", {"bytes": buffer.getvalue(), "path": None}]
    rows = [{"problem": f"<image>{n}?", "images": [form], "answer": str(n)} for n, form in enumerate(forms)]
    path = write_rows([*rows, {"problem": "none?", "images": [], "answer": "4", "extra": 1}], tmp_path)
    prompts = create("dataset", DatasetSpec(name="table", path=str(path))).load()
    assert [prompt.id for prompt in prompts] == [f"train/{n}" for n in range(5)]
    assert [prompt.columns["extra"] for prompt in prompts] == [None] * 4 + [1]
    for prompt in prompts[:4]:
        found = Image.open(io.BytesIO(prompt.images[0].data))
        assert np.array_equal(np.asarray(found), np.asarray(picture))
    assert not prompts[4].images
    assert write_rows([*rows, {"problem": "none?", "images": [], "answer": "4", "extra": 1}], tmp_path) == path


def test_rows_that_cannot_be_written_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        write_rows([], tmp_path)
    with pytest.raises(ConfigError, match="a row is a str, and no mapping"):
        write_rows(["a"], tmp_path)
    with pytest.raises(DataError, match="the column a holds values of several kinds"):
        write_rows([{"a": 1}, {"a": "x"}], tmp_path)
    with pytest.raises(DataError, match=r"nowhere.png cannot be read: No such file") as caught:
        write_rows([{"images": [Path("nowhere.png")]}], tmp_path)
    assert caught.value.where == "dataset, row 0, images"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [2**70, np.uint64(2**63 + 1), "\ud800", [{"a": "\ud800"}]])
def test_a_value_that_cannot_be_written_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match="cannot be written") as caught:
        write_rows([{"a": None}, {"a": value}], tmp_path)
    assert caught.value.where == "dataset, row 1, a"


def test_a_column_of_empty_mappings_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the column a cannot be written"):
        write_rows([{"a": [{}]}, {"a": []}], tmp_path)
    write_rows([{"a": {}}, {"a": {"b": 1}}], tmp_path)


def jpeg(orientation: int) -> bytes:
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.linear_gradient("L").crop((0, 0, 256, 64)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_image_that_was_opened_is_shown_as_its_file_is(tmp_path: Path, orientation: int) -> None:
    data = jpeg(orientation)
    path = write_rows([{"problem": "<image>?", "images": [Image.open(io.BytesIO(data))], "answer": "1"}], tmp_path)
    (prompt,) = create("dataset", DatasetSpec(name="table", path=str(path))).load()
    shown = [ImageOps.exif_transpose(Image.open(io.BytesIO(each))) for each in (prompt.images[0].data, data)]
    assert np.array_equal(np.asarray(shown[0]), np.asarray(shown[1]))


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    closed, truncated = Image.new("RGB", (8, 8)), Image.open(io.BytesIO(jpeg(1)[:-99]))
    closed.close()
    for image in (closed, truncated):
        with pytest.raises(DataError, match=r"the image cannot be read: .") as caught:
            write_rows([{"images": [image]}], tmp_path)
        assert caught.value.where == "dataset, row 0, images"
