"""Columns by their names and by what stands in them: used, told of, or refused; never left out in silence."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl_datasets.names import PICTURES, REFERENCES
from mmrl_datasets.table import Table


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (28, 28)).save(buffer, "PNG")
    return buffer.getvalue()


BASE64 = base64.b64encode(picture()).decode()
STRUCT = {"bytes": picture(), "path": None}
QUESTION = {"question": "?", "answer": "1"}


def table(folder: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> Table:
    """The table of a file: parquet where a cell is bytes, else lines of JSON; ``a.png`` lies beside it."""
    (folder / "a.png").write_bytes(picture())
    try:
        path = folder / "t.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except TypeError:
        path = folder / "t.parquet"
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return Table(Table.Config(path=str(path), **options))


KNOWN = ["images", "image", "decoded_image", "image_path", "image_paths", *PICTURES, *REFERENCES]


@pytest.mark.parametrize("name", KNOWN)
def test_conventional_names_are_the_images_where_they_hold_pictures(name: str, tmp_path: Path) -> None:
    found = table(tmp_path, [QUESTION | {name: None}, QUESTION | {name: "a.png"}])
    prompts = found.load()
    assert [len(prompt.images) for prompt in prompts] == [0, 1]
    assert prompts[1].images[0].data == picture()
    assert found.describe()["images"] == name and not found.notes()


@pytest.mark.parametrize(
    ("name", "cell"),
    [("img", 7), ("picture", "a red ball"), ("photo", True), ("jpg", ""), ("file_name", "a.txt"), ("png", [1, 2])],
)
def test_conventional_names_are_no_images_where_they_hold_something_else(name: str, cell: Any, tmp_path: Path) -> None:
    found = table(tmp_path, [QUESTION | {name: cell}] * 3)
    assert found.load()[0].images == () and found.load()[0].columns[name] == cell
    assert "images" not in found.describe()


HELD: dict[str, Any] = {
    "a path": "a.png",
    "a path with blanks": "Screenshot of 2024 at 10.00.JPEG",
    "an absolute path": "/disk/a.webp",
    "an address": "https://x.org/a.png?size=3",
    "a file's address": "file:///disk/a.png",
    "a data URI": f"data:image/png;base64,{BASE64}",
    "base64": BASE64,
    "bytes": picture(),
    "a struct": STRUCT,
    "a struct of a path": {"bytes": None, "path": "a.png"},
    "verl": {"image": "a.png"},
    "OpenAI": {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
    "a list": ["a.png", "b.png"],
    "a list of structs": [STRUCT],
    "a list of a list": [["a.png"]],
    "pixels": [[[0, 0, 0]] * 8] * 8,
    "a format that cannot be read": "a.heic",
    "bytes that cannot be read": b"\0\0\0\x1cftypavif\0\0\0\0",
    "another format": "a.ppm",
}


@pytest.mark.parametrize("form", HELD)
@pytest.mark.parametrize("first", ["filled", "null"])
def test_pictures_under_an_unknown_name_are_an_error_with_both_ways_out(form: str, first: str, tmp_path: Path) -> None:
    rows = [QUESTION | {"chart": HELD[form]}] * 3
    number = 0
    if first == "null":
        rows, number = [QUESTION | {"chart": None}] * 300 + rows, 300
    with pytest.raises(DataError, match="Pictures would not be used") as caught:
        table(tmp_path, rows).load()
    assert f"'chart' (row {number}: " in caught.value.what
    assert caught.value.remedy.startswith('write data.train.images: chart, or data.train.images: ""')
    assert table(tmp_path, rows, images="").load()[0].images == ()


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("chart", "a bar chart"), ("url", "https://x.org/page.html"), ("chart", [1, 2, 3]), ("chart", b"\x00\x01"),
        ("chart", {"bytes": b"RIFF....", "path": "a.wav"}), ("chart", [[0.5, 1.5, 2.5, 3.5]]), ("sha", "iVBORw0KGgo"),
    ],
)  # fmt: skip
def test_other_cells_are_no_pictures(name: str, cell: Any, tmp_path: Path) -> None:
    assert table(tmp_path, [QUESTION | {name: cell}] * 3).load()[0].images == ()


def test_pictures_in_structs_are_named_by_their_field(tmp_path: Path) -> None:
    rows = [QUESTION | {"extra": {"id": 3, "view": {"shot": "a.png"}}}] * 2
    with pytest.raises(DataError, match=r"'extra.view.shot' \(row 0: paths of images\)"):
        table(tmp_path, rows).load()
    assert len(table(tmp_path, rows, images="extra.view.shot").load()[1].images) == 1


@pytest.mark.parametrize("key", ["file_name", "src", "png", "local_path"])
def test_pictures_in_structs_of_a_list_are_named_by_their_field(key: str, tmp_path: Path) -> None:
    rows = [QUESTION | {"views": [{key: None, "id": 1}]}, QUESTION | {"views": [{"id": 1, key: "a.png"}] * 2}]
    with pytest.raises(DataError, match=rf"'views.{key}' \(row 1: paths of images\)") as caught:
        table(tmp_path, rows).load()
    assert caught.value.remedy.startswith(f"write data.train.images: views.{key}, ")
    assert len(table(tmp_path, rows, images=f"views.{key}").load()[1].images) == 2


def test_an_unknown_key_of_an_image_cell_is_named_with_a_dot(tmp_path: Path) -> None:
    rows = [QUESTION | {"images": [{"type": "image", "file_name": "a.png"}]}]
    with pytest.raises(DataError, match="has the keys 'type', 'file_name'") as caught:
        table(tmp_path, rows).load()[0]
    assert caught.value.remedy.endswith("data.train.images: COLUMN.file_name")
    assert len(table(tmp_path, rows, images="images.file_name").load()[0].images) == 1


def test_numbered_pictures_are_named_together(tmp_path: Path) -> None:
    rows = [QUESTION | {"fig_1": "a.png", "fig_2": "a.png"}]
    with pytest.raises(DataError, match=r"'fig_1' .*, 'fig_2' ") as caught:
        table(tmp_path, rows).load()
    assert "data.train.images: fig_1..n" in caught.value.remedy
    assert len(table(tmp_path, rows, images="fig_1..n").load()[0].images) == 2


@pytest.mark.parametrize("names", [("image", "img"), ("picture", "photo"), ("image_url", "file_name")])
def test_two_columns_that_could_be_the_images_are_an_error(names: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"Several columns could be the images: {names[0]}, {names[1]}"):
        table(tmp_path, [QUESTION | dict.fromkeys(names, "a.png")]).load()


def test_pictures_beside_the_images_are_told_once(tmp_path: Path) -> None:
    rows = [QUESTION | {"image": "a.png", "thumbnail": STRUCT, "file_name": "a.png"}] * 3
    found = table(tmp_path, rows)
    [prompt, *_] = found.load()
    assert len(prompt.images) == 1 and "thumbnail" not in prompt.columns
    thumbnail, name = found.notes()
    assert "'thumbnail' (row 0: encoded images) holds pictures too, and the images are those of 'image'" in thumbnail
    assert "'file_name' (row 0: paths of images)" in name and "images: image to leave it so" in name
    origin = table(tmp_path, [QUESTION | {"image": "a.png", "coco_url": "https://x.org/a.jpg"}])
    assert origin.load() and not origin.notes()
    chosen = table(tmp_path, rows, images="image")
    assert len(chosen.load()[0].images) == 1 and not chosen.notes()


def test_few_pictures_in_a_column_are_told_and_videos_too(tmp_path: Path) -> None:
    rows = [QUESTION | {"source_file": f"{i}.pdf", "clip": "a.mp4"} for i in range(6)] + [
        QUESTION | {"source_file": "a.png"}
    ]
    found = table(tmp_path, rows)
    assert found.load()[6].images == ()
    assert [note.partition(" holds")[0] for note in found.notes()] == [
        "column 'source_file' (row 6: paths of images)", "column 'clip' (row 0: videos or sounds)"
    ]  # fmt: skip


LOOKALIKES: list[tuple[str, Any, str]] = [
    ("final_answer", "1", "looks like the answer, and 'answer' is used: write answer: final_answer, or answer: answer"),
    ("Gold", 1, "looks like the answer"),
    ("reference", "1", "looks like the answer"),
    ("answer_choices", ["1"], 'looks like the choices, and is not read: write choices: answer_choices, or choices: ""'),
    ("candidates", "['1', '2']", "looks like the choices"),
    ("system_message", "Be brief.", "looks like the system prompt"),
    ("response", "so 1", "looks like completions to imitate"),
    ("reasoning_content", "hm", "looks like completions to imitate"),
    ("context", "Once upon a time", "looks like a part of the question"),
    ("dialog", [{"role": "user", "content": "?"}], "holds a conversation, and 'question' is the prompt"),
    ("chosen", [{"from": "human", "value": "?"}], "holds a conversation"),
    ("tools", [{"name": "crop"}], "lists tools"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cell", "told"), LOOKALIKES, ids=[name for name, _, _ in LOOKALIKES])
def test_a_column_that_looks_needed_is_named_once(name: str, cell: Any, told: str, tmp_path: Path) -> None:
    found = table(tmp_path, [QUESTION | {name: None}, QUESTION | {name: cell}, QUESTION | {name: cell}])
    assert found.load()[1].columns[name] == cell
    [note] = found.notes()
    assert note.startswith(f"column {name!r} (row 1) ") and told in note
    empty = table(tmp_path, [QUESTION | {name: None}])
    assert empty.load() and not empty.notes()


def test_what_the_user_decided_is_not_told_of(tmp_path: Path) -> None:
    row = QUESTION | {"final_answer": "1", "option": "1", "system_message": "s", "output": "o"}
    decided = {"answer": "answer", "choices": "", "system": "", "demonstration": ""}
    found = table(tmp_path, [row], **decided)
    assert found.load() and not found.notes()


def test_ordinary_columns_are_not_told_of(tmp_path: Path) -> None:
    row = {
        "id": 1,
        "level": 3,
        "kind": "sum",
        "values": "[1]",
        "extra_info": {"split": "train"},
        "url": "https://x.org",
    }
    found = table(tmp_path, [QUESTION | row] * 3)
    assert found.load() and not found.notes()


def test_choices_in_columns_of_their_own_are_told(tmp_path: Path) -> None:
    for letters in ("ABCD", ("option_a", "option_b", "option_c"), ("option1", "option2", "option3")):
        found = table(tmp_path, [QUESTION | dict.fromkeys(letters, "x")])
        assert found.load()
        [note] = found.notes()
        assert note.startswith(f"columns {', '.join(letters)} look like the choices")


def test_letters_as_answers_without_choices_are_told(tmp_path: Path) -> None:
    rows = [{"question": "Which? (A) 3 (B) 4", "answer": letter} for letter in ("B", "(a)", "C.")]
    found = table(tmp_path, rows)
    assert found.load()
    [note] = found.notes()
    assert "'answer' holds letters (row 0: 'B')" in note and "choices: COLUMN" in note and 'choices: ""' in note
    for settled in (table(tmp_path, rows, choices=""), table(tmp_path, [r | {"choices": ["3", "4"]} for r in rows])):
        assert settled.load() and not settled.notes()
    words = table(tmp_path, [*rows, {"question": "?", "answer": "blue"}])
    assert words.load() and not words.notes()


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "?"}, "add such a column"),
        ({"prompt": "?", "image": "a.png", "system": "s"}, "add such a column"),
        ({"prompt": "?", "gold": "1"}, "name one of them, such as data.train.answer: gold"),
        ({"prompt": "?", "id": 3, "Final Answer": "1"}, "name one of them, such as data.train.answer: Final Answer"),
        ({"prompt": "?", "note": "1"}, "name one of them, such as data.train.answer: note"),
    ],
)
def test_a_missing_answer_is_answered_with_what_helps(row: dict[str, Any], example: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="None of the columns is known as an answer") as caught:
        table(tmp_path, [row]).load()
    assert caught.value.remedy.startswith(
        f'{example}; or write data.train.answer: "" if there is none, as where an env'
    )


def test_a_capital_is_no_other_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="known as a prompt") as caught:
        table(tmp_path, [{"id": 3, "Question": "?", "Answer": "1"}]).load()
    assert "data.train.prompt: Question" in caught.value.remedy
