"""Links on the disk that whoever laid out the data made: followed, and named where they lead nowhere."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl_datasets.table import Table

ROW = {"problem": "?", "image": "img/a.png", "answer": "1"}


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(folder: Path, row: dict[str, Any] = ROW) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def link(place: Path, target: Path | str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    return place


def shared_data(disk: Path) -> Path:
    """A data file on the shared disk, beside the folder of its pictures."""
    rows(disk)
    return disk


LAYOUTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "the folder of images is a link": lambda data, disk: {"path": rows(data), "_": link(data / "img", disk / "img")},
    "a relative link": lambda data, disk: {"path": rows(data), "_": link(data / "img", "../disk/img")},
    "a link to a link": lambda data, disk: {
        "path": rows(data), "_": (link(data / "img", "other"), link(data / "other", disk / "img"))
    },
    "an image is a link": lambda data, disk: {"path": rows(data), "_": link(data / "img/a.png", disk / "img/a.png")},
    "a link within a folder of a link": lambda data, disk: {
        "path": rows(data, ROW | {"image": "img/b.png"}),
        "_": (link(data / "img", disk / "img"), link(disk / "img/b.png", "a.png")),
    },
    "a link below": lambda data, disk: {
        "path": rows(data, ROW | {"image": "x/img/a.png"}), "_": link(data / "x", disk)
    },
    "the data file is a link, and images lie beside the link": lambda data, disk: {
        "path": link(data / "train.jsonl", rows(disk / "tables")), "_": link(data / "img", disk / "img")
    },
    "the data file is a link, and images lie beside the file": lambda data, disk: {
        "path": link(data / "train.jsonl", shared_data(disk) / "train.jsonl")
    },
    "a folder holds a data file that is a link": lambda data, disk: {
        "path": link(data / "train.jsonl", shared_data(disk) / "train.jsonl").parent
    },
    "the folder of the data is a link": lambda data, disk: {"path": link(data, shared_data(disk))},
    "image_root is a link": lambda data, disk: {"path": rows(data), "image_root": link(data / "root", disk)},
    "image_root has a link": lambda data, disk: {
        "path": rows(data), "image_root": link(data / "root/img", disk / "img").parent
    },
    "an absolute path through a link": lambda data, disk: {
        "path": rows(data, ROW | {"image": str(data / "img/a.png")}), "_": link(data / "img", disk / "img")
    },
    "an absolute path into what the data's folder is a link to": lambda data, disk: {
        "path": link(data, rows(disk, ROW | {"image": str(disk / "img/a.png")}).parent) / "train.jsonl"
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_of_the_datas_owner_are_followed(layout: str, tmp_path: Path) -> None:
    (tmp_path / "disk" / "img").mkdir(parents=True)
    (tmp_path / "disk" / "img" / "a.png").write_bytes(picture())
    options = LAYOUTS[layout](tmp_path / "data", tmp_path / "disk")
    texts = {name: str(value) for name, value in options.items() if name != "_"}
    [prompt] = Table(Table.Config(**texts)).load()
    assert prompt.images[0].data == picture()


BROKEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a folder of images": lambda data: {"path": rows(data), "_": link(data / "img", "/disk/gone")},
    "an image": lambda data: {"path": rows(data), "_": link(data / "img/a.png", "/disk/gone")},
    "a loop": lambda data: {"path": rows(data), "_": link(data / "img", "img")},
    "a data file": lambda data: {"path": link(data / "train.jsonl", "/disk/gone")},
    "a data file in a folder": lambda data: {"path": link(data / "train.jsonl", "/disk/gone").parent},
    "image_root": lambda data: {"path": rows(data), "image_root": link(data / "root", "/disk/gone")},
}


@pytest.mark.parametrize("place", BROKEN)
def test_a_link_that_leads_nowhere_is_named_with_its_target(place: str, tmp_path: Path) -> None:
    options = BROKEN[place](tmp_path / "data")
    texts = {name: str(value) for name, value in options.items() if name != "_"}
    with pytest.raises(DataError) as caught:
        Table(Table.Config(**texts)).load()[0]
    target = "img" if place == "a loop" else "/disk/gone"
    assert f"is a link to {target}, which is not there" in caught.value.where
    assert caught.value.remedy
