"""Rows of every layout in use, with images in every form, and what is wrong with rows."""

from __future__ import annotations

import base64
import io
import json
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.types import Message, Prompt
from mmrl_datasets import choice_cells, images
from mmrl_datasets.columns import choose_columns
from mmrl_datasets.glances import Glance, look
from mmrl_datasets.names import ALIASES
from mmrl_datasets.reader import RowReader
from mmrl_datasets.table import Table

PIXELS = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
PICTURE = Image.fromarray(PIXELS)


def encoded(image: Image.Image = PICTURE) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Listed:
    """Rows in memory."""

    image_columns: tuple[str, ...] = ()

    def __init__(self, *rows: Mapping[str, Any]) -> None:
        self.rows = rows
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return {name: self.rows[index].get(name) for name in self.columns}

    def glance(self, columns: Sequence[str]) -> Glance:
        return look(self.read, range(len(self)), columns)


def reader(*rows: Mapping[str, Any], root: Path | None = None, **options: Any) -> RowReader:
    config = Table.Config(path="t", **options)
    named = {role: getattr(config, role) for role in ALIASES}
    return RowReader(config, choose_columns(Listed(*rows), named, "t"), "train", [root] if root else [])


SPELLED = ["What does <image> do?", "See <image 1> and <image_2>.", "<image> <image 3>", "<image></image>?"]


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("images_cell", [{}, {"images": []}, {"images": None}], ids=["none", "empty", "null"])
def test_a_row_without_images_may_spell_their_places(text: str, images_cell: dict[str, Any]) -> None:
    found = read({"problem": text, "answer": "1", **images_cell})
    assert found.messages == (Message("user", text),) and found.images == ()
    turns = [("user", text), ("assistant", f"As {text}"), ("user", "And?"), ("assistant", f"It is {text}")]
    talk = [{"role": role, "content": content} for role, content in turns]
    found = read({"messages": talk, **images_cell})
    assert [(each.role, each.content) for each in found.messages] == turns[:3]
    assert found.demonstration == f"It is {text}" and found.images == ()
    found = read(
        {"problem": text, "answer": "1", "tag": "<image>", **images_cell}, prompt_template="{{ row.tag }} {{ prompt }}"
    )
    assert found.messages[-1].content == f"<image> {text}"


def test_a_last_turn_that_shows_an_image_of_its_row_is_an_error() -> None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}]
    with pytest.raises(DataError, match="The assistant's last turn shows an image"):
        read({"messages": talk, "images": [encoded()]})


def read(row: Mapping[str, Any], *, root: Path | None = None, **options: Any) -> Prompt:
    return reader(row, root=root, **options).read(0, dict(row))


def refused(row: Mapping[str, Any], *, root: Path | None = None, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(row, root=root, **options)
    assert "row 0" in caught.value.where
    return caught.value


def shown(prompt: Prompt) -> list[list[Any]]:
    return [np.asarray(Image.open(io.BytesIO(image.data)).convert("RGB")).tolist() for image in prompt.images]


FORMS: dict[str, Callable[[], Any]] = {
    "pillow": lambda: PICTURE,
    "bytes and null": lambda: {"bytes": encoded(), "path": None},
    "bytes and a path that is not there": lambda: {"bytes": encoded(), "path": "gone.png"},
    "null and path": lambda: {"bytes": None, "path": "img/a.png"},
    "raw bytes": encoded,
    "bytearray": lambda: bytearray(encoded()),
    "relative path": lambda: "img/a.png",
    "data URI": lambda: "data:image/png;base64," + base64.b64encode(encoded()).decode(),
    "base64": lambda: base64.b64encode(encoded()).decode(),
    "verl": lambda: {"image": "img/a.png"},
    "a part of a message": lambda: {"type": "image", "image": {"bytes": encoded(), "path": None}, "text": None},
    "an address of a file": lambda: {"image": "file://img/a.png"},
    "OpenAI": lambda: {"type": "image_url", "image_url": {"url": FORMS["data URI"]()}},
    "Anthropic": lambda: {"type": "image", "source": {"type": "base64", "data": FORMS["base64"]()}},
    "sizes beside it": lambda: {"image": encoded(), "min_pixels": 3136, "max_pixels": 50176},
    "numpy array": lambda: PIXELS,
    "nested lists": lambda: PIXELS.tolist(),
}
ASK, TAGGED = "Find x.", "<answer> 48 </answer>"
LAYOUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "geometry3k": lambda cell: {"problem": "<image>Find x.", "images": [cell], "answer": "48"},
    "R1-V": lambda cell: {"problem": ASK, "image": cell, "solution": TAGGED},
    "MathVista without its path": lambda cell: {"question": ASK, "decoded_image": cell, "answer": "48"},
    "MMMU": lambda cell: {
        "question": "<image 1>Find x.", "options": "[]", "image_1": cell, "image_2": None, "answer": "48"
    },
    "ChartQA": lambda cell: {"query": ASK, "image": cell, "label": ["48"]},
    "verl": lambda cell: {
        "data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [cell], "reward_model": {"style": "rule", "ground_truth": "48"}, "extra_info": {"split": "train"},
    },
    "TRL": lambda cell: {
        "prompt": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": ASK}]}],
        "images": [cell], "ground_truth": "48",
    },
    "TRL with a part's own image": lambda cell: {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": cell}, {"type": "text", "text": ASK}]}],
        "target": "48",
    },
    "LLaMA-Factory sharegpt": lambda cell: {
        "conversations": [{"from": "human", "value": "<image>Find x."}, {"from": "gpt", "value": "48"}],
        "images": [cell],
    },
    "LLaMA-Factory messages": lambda cell: {
        "messages": [{"role": "user", "content": "<image>Find x."}, {"role": "assistant", "content": "48"}],
        "images": [cell],
    },
    "ms-swift messages": lambda cell: {
        "messages": [{"role": "user", "content": "<image>Find x."}], "images": [cell], "solution": TAGGED
    },
    "ms-swift query": lambda cell: {"query": "<image>Find x.", "images": [cell], "solution": TAGGED},
    "messages as JSON text": lambda cell: {
        "messages": json.dumps([{"role": "user", "content": "<image>Find x."}]), "image_path": cell, "answers": ["48"]
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_with_each_form_of_image_is_one_prompt(layout: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(encoded())
    row = LAYOUTS[layout](FORMS[form]())
    before = str(row)
    prompt = read(row, root=tmp_path)
    assert prompt.id == "train/0"
    assert prompt.messages == (Message("user", "<image>Find x."),)
    assert shown(prompt) == [PIXELS.tolist()]
    assert prompt.answer in ("48", ["48"], TAGGED)
    assert prompt.source == row.get("data_source", "")
    assert not {"images", "image", "decoded_image", "image_1", "image_2", "image_path"} & set(prompt.columns)
    assert json.dumps(dict(prompt.columns))
    assert str(row) == before


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        ('["a.png", "a.png"]', 2), ('{"image": "a.png"}', 1), ([["a.png"], ["a.png", "a.png"]], 3), ([[]], 0),
        ([["a.png"], []], 1), ('[{"image": "a.png"}]', 1), ("[1].png", 1),
    ],
)  # fmt: skip
def test_lists_of_images_may_be_nested_or_written_as_text(cell: Any, count: int, tmp_path: Path) -> None:
    for name in ("a.png", "[1].png"):
        (tmp_path / name).write_bytes(encoded())
    assert len(read({"problem": "?", "images": cell, "answer": "1"}, root=tmp_path).images) == count


NOTHING = {"null": None, "an empty list": [], "empty text": ""}


@pytest.mark.parametrize("nothing", NOTHING)
def test_a_row_without_images_is_a_text_row(nothing: str) -> None:
    prompt = read({"problem": "1 + 1?", "images": NOTHING[nothing], "answer": "2"})
    assert (prompt.messages, prompt.images) == ((Message("user", "1 + 1?"),), ())


def test_arrays_are_one_image_or_several_by_their_levels() -> None:
    grey = PIXELS[..., 0]
    for cell, expected in [
        (grey.tolist(), [grey]),
        (grey, [grey]),
        ([grey.tolist(), grey.tolist()], [grey, grey]),
        ([PIXELS.tolist(), PIXELS[::2].tolist()], [PIXELS, PIXELS[::2]]),
        (np.stack([PIXELS, PIXELS]), [PIXELS, PIXELS]),
        (PIXELS[..., :1].tolist(), [grey]),
        ([PIXELS, grey], [PIXELS, grey]),
    ]:
        prompt = read({"problem": "?", "images": cell, "answer": "1"})
        as_rgb = [each if each.ndim == 3 else np.stack([each] * 3, 2) for each in expected]
        assert shown(prompt) == [each.tolist() for each in as_rgb]
        assert prompt.messages[0].content == "<image>" * len(expected) + "?"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16"])
def test_pillow_images_keep_their_pixels_in_every_mode(mode: str) -> None:
    image = PICTURE.convert(mode)
    stored = Image.open(io.BytesIO(read({"problem": "?", "image": image, "answer": "1"}).images[0].data))
    assert stored.mode == mode
    assert stored.tobytes() == image.tobytes()


def test_a_pillow_image_keeps_its_orientation_and_transparency() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    PICTURE.save(buffer, "JPEG", exif=exif)
    opened = Image.open(buffer)
    stored = Image.open(io.BytesIO(read({"problem": "?", "image": opened, "answer": "1"}).images[0].data))
    assert stored.getexif()[0x0112] == 6
    palette = PICTURE.convert("P")
    palette.info["transparency"] = 3
    stored = Image.open(io.BytesIO(read({"problem": "?", "image": palette, "answer": "1"}).images[0].data))
    assert stored.info["transparency"] == 3


URI = "data:image/png;base64,"
TWO = {"images": [encoded(), encoded()], "answer": "1"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"problem": "?", "images": [None], "answer": "1"}, "image cell holds null", "images[0]"),
    ({"problem": "?", "images": 7, "answer": "1"}, "image cell holds int", "images[0]"),
    ({"problem": "?", "images": [1, 2, 3], "answer": "1"}, "image cell holds int", "images[0]"),
    ({"problem": "?", "images": {}, "answer": "1"}, "image cell holds null", "images[0]"),
    ({"problem": "?", "images": {"image": None}, "answer": "1"}, "image cell holds null", "images[0]"),
    ({"problem": "?", "images": [{"pic": "a.png", "n": 1}], "answer": "1"}, "has the keys 'pic', 'n'", "images[0]"),
    ({"problem": "?", "images": [{"image": {"pic": 1}}], "answer": "1"}, "has the keys 'pic'", "images[0]"),
    ({"problem": "?", "images": [{"bytes": 7}], "answer": "1"}, "image cell holds int", "images[0]"),
    ({"problem": "?", "images": [[0, 256]], "answer": "1"}, "image cell holds an array", "images[0]"),
    ({"problem": "?", "images": [[0], [1, 2]], "answer": "1"}, "image cell holds an array", "images[0]"),
    ({"problem": "?", "images": np.zeros((4, 4)), "answer": "1"}, "array of shape (4, 4) and type float64", "images"),
    ({"problem": "?", "images": np.zeros((2, 4, 4, 7), "u1"), "answer": "1"}, "shape (4, 4, 7)", "images[0]"),
    ({"problem": "?", "images": "http://x.org/a.png", "answer": "1"}, "an address, and images are not", "images[0]"),
    ({"problem": "?", "images": "data:text/html,x", "answer": "1"}, "no image in base64", "images[0]"),
    ({"problem": "?", "images": URI + "###", "answer": "1"}, "data: URI is damaged", "images[0]"),
    ({"problem": "?", "images": "/9j/" + "A" * 41, "answer": "1"}, "base64 is damaged", "images[0]"),
    ({"problem": "?", "images": "a.png", "answer": "1"}, "does not lie in the dataset's folder", "images[0]"),
    ({"problem": "<image>", **TWO}, "1 <image> and 2 images", "'problem'"),
    ({"problem": "<image><image><image>", **TWO}, "3 <image> and 2 images", "'problem'"),
    ({"problem": "<image 1> <image 3>", **TWO}, "names <image 3>, which", "'problem'"),
    ({"problem": "<image 0>", **TWO}, "names <image 0>", "'problem'"),
    ({"problem": "<image 2>?", **TWO}, "not <image 1>, which the row has", "'problem'"),
    ({"problem": "<image 1> <image>", **TWO}, "both <image> and numbered", "'problem'"),
    ({"problem": "<image 1>" * 1025, "image": encoded(), "answer": "1"}, "shows 1025 images", "'problem'"),
    ({"problem": "<video>?", "answer": "1"}, "the placeholder <video>", "'problem'"),
    ({"problem": "<audio 1>?", "answer": "1"}, "the placeholder <audio 1>", "'problem'"),
    ({"problem": "?", "videos": ["a.mp4"], "answer": "1"}, "The row has video", "'videos'"),
    ({"problem": "?", "audio": {"bytes": b"RIFF", "path": None}, "answer": "1"}, "The row has audio", "'audio'"),
    ({"problem": None, "answer": "1"}, "'problem' is null", "'problem'"),
    ({"problem": 7, "answer": "1"}, "'problem' holds int", "'problem'"),
    ({"problem": " \n", "answer": "1"}, "question is empty", "'problem'"),
    ({"problem": "?", "answer": None}, "'answer' is null", "row 0"),
    ({"problem": "?", "answer": float("nan")}, "'answer' is null", "row 0"),
    ({"problem": "?", "answer": b"1"}, "'answer' holds bytes", "row 0"),
    ({"problem": "?", "answer": "1", "system": 7}, "'system' holds int", "row 0"),
    ({"problem": "?", "answer": "1", "data_source": 7}, "'data_source' holds int", "row 0"),
    ({"problem": "?", "answer": "1", "choices": 7}, "no list of texts", "'choices'"),
    ({"problem": "?", "answer": "1", "choices": [None]}, "no list of texts", "'choices'"),
    ({"problem": "?", "answer": "1", "options": "__import__('os')"}, "choices are no list", "'options'"),
    ({"problem": "?", "answer": "1", "options": "[" * 9999}, "choices are no list", "'options'"),
    ({"problem": "?", "answer": "1", "options": str(["x" * 70_000])}, "choices have 700", "'options'"),
    ({"problem": "?", "answer": "1", "choices": list("abcdefghijklmnopqrstuvwxyzß")}, "27 choices", "'choices'"),
    ({"messages": [], "answer": "1"}, "messages is empty", "'messages'"),
    ({"messages": "[{'role': 'user'}]", "answer": "1"}, "no JSON list of messages", "'messages'"),
    ({"messages": '{"role": "user"}', "answer": "1"}, "no list of messages", "'messages'"),
    ({"messages": [{"role": "user"}], "answer": "1"}, "no message", "message 0"),
    ({"messages": [{"role": "critic", "content": "?"}], "answer": "1"}, "role 'critic' is not known", "message 0"),
    ({"messages": [{"role": "user", "content": None}], "answer": "1"}, "message holds null", "message 0"),
    ({"messages": [{"role": "user", "content": [{"type": "box"}]}], "answer": "1"}, "known type: box", "message 0"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}], "answer": "1"}, "has video", "message 0"),
    ({"messages": [{"role": "system", "content": "?"}], "answer": "1"}, "no user turn at its end", "'messages'"),
    ({"messages": [{"role": "assistant", "content": "?"}], "answer": "1"}, "no user turn", "'messages'"),
    ({"messages": [{"role": "tool", "content": "?"}], "answer": "1"}, "no user turn", "'messages'"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "answer": "1"},
        "A tool call of the message has no name",
        "message 0",
    ),
    ({"messages": [{"role": "user", "content": "?"}]}, "row has no answer", "'messages'"),
    (
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "?"}], "system": "b", "label": 1},
        "a system message and a system prompt",
        "'system'",
    ),
]


@pytest.mark.parametrize(("row", "message", "place"), BAD, ids=[message for _, message, _ in BAD])
def test_what_is_wrong_with_a_row_names_its_column(row: dict[str, Any], message: str, place: str) -> None:
    error = refused(row)
    assert message in error.what
    assert place in error.where
    assert len(str(error)) < 2000


def test_a_large_data_uri_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1000)
    monkeypatch.setattr(images.base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    assert "too large" in refused({"problem": "?", "images": URI + "A" * 1400, "answer": "1"}).what


def test_an_array_of_too_many_pixels_is_refused() -> None:
    huge = np.broadcast_to(np.uint8(0), (10_000, 6_000))
    assert "6000x10000 pixels" in refused({"problem": "?", "images": huge, "answer": "1"}).what


def test_numbered_placeholders_show_their_images_in_the_order_and_as_often_as_they_are_named() -> None:
    pictures = [encoded(Image.new("RGB", (30, 30), (shade, 0, 0))) for shade in (1, 2, 3)]
    row = {"question": "<image 3> then <image 1> then <image 3>?", "answer": "1"}
    row |= {f"image_{number}": {"bytes": data, "path": None} for number, data in enumerate(pictures, 1)}
    assert "not <image 2>" in refused(row).what
    prompt = read(row, unused_images="drop")
    assert prompt.messages[0].content == "<image> then <image> then <image>?"
    assert [image.data for image in prompt.images] == [pictures[2], pictures[0], pictures[2]]
    assert prompt.images[0].label.endswith("row 0, image_3")
    row["image_2"] = None
    assert read(row).images == prompt.images
    row["image_1"] = None
    assert "names <image 1>, which the row does not have" in refused(row).what


def test_a_chat_keeps_its_turns_and_its_last_answer_is_the_demonstration() -> None:
    chat = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>What is this?"},
        {"from": "gpt", "value": "A triangle."},
        {"from": "human", "value": "And <image>?"},
        {"from": "gpt", "value": "A circle."},
    ]
    prompt = read({"conversations": chat, "images": [encoded(), encoded()]})
    assert prompt.messages == (
        Message("system", "Be brief."),
        Message("user", "<image>What is this?"),
        Message("assistant", "A triangle."),
        Message("user", "And <image>?"),
    )
    assert (prompt.demonstration, prompt.answer) == ("A circle.", "A circle.")
    graded = read({"conversations": chat, "images": [encoded(), encoded()], "answer": "circle"})
    assert (graded.demonstration, graded.answer) == ("A circle.", "circle")


def test_images_in_parts_and_in_columns_keep_their_order() -> None:
    inline, column = encoded(Image.new("RGB", (30, 30))), encoded()
    uri = URI + base64.b64encode(inline).decode()
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "and"}, {"type": "image"}]
    row = {"prompt": [{"role": "user", "content": parts}], "image": column, "answer": "1", "level": 3}
    prompt = read(row)
    assert prompt.messages[0].content == "<image>and<image>"
    assert [image.data for image in prompt.images] == [inline, column]
    assert prompt.columns == {"answer": "1", "level": 3}


def test_a_system_column_comes_first() -> None:
    prompt = read({"problem": "?", "system_prompt": "Be brief.", "answer": "1"})
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "?"))
    assert read({"problem": "?", "system_prompt": None, "answer": "1"}).messages == (Message("user", "?"),)


def test_choices_are_listed_once() -> None:
    listed = "Which?\n(A) 3\n(B) none"
    for cell in (["3", "none"], "['3', 'none']", '["3", "none"]', [3, "none"]):
        prompt = read({"question": "Which?", "options": cell, "answer": "A"})
        assert (prompt.messages[0].content, prompt.choices) == (listed, ("3", "none"))
    for question in (listed, "Which? A. 3 B. none", "Choices:\n(A) 3\n(B) none\nWhich?"):
        assert read({"question": question, "choices": ["3", "none"], "answer": "A"}).messages[0].content == question
    assert "(A)" in read({"question": "Is it 3 or none?", "choices": ["3", "none"], "answer": "A"}).messages[0].content
    plain = read({"question": "Which?", "choices": ["3", "none"], "answer": "A"}, list_choices=False)
    assert (plain.messages[0].content, plain.choices) == ("Which?", ("3", "none"))
    for none in (None, [], "[]", ""):
        prompt = read({"question": "Which?", "choices": none, "answer": "A"})
        assert (prompt.messages[0].content, prompt.choices) == ("Which?", ())


@pytest.mark.parametrize(
    ("question", "given", "is_listed"),
    [
        ("Which? A. 35 B. 45", ["3", "4"], False),
        ("Fig A: 10 cm, B: 20 cm. Which is longer?", ["10", "20"], False),
        ("Fig A: 10 cm, B: 20 cm. Which is longer?", ["10 cm", "20 cm"], False),
        ("A: 3, B: 4 and C: 5 are given. AB?", ["3", "4"], False),
        ("B. 4 A. 3", ["3", "4"], False),
        ("(A) 3 (B) 45", ["3", "4"], False),
        ("(A) 3", ["3", "4"], False),
        ("(A) 3.5 (B) 4", ["3", "4"], False),
        ("PA. 3 (B) 4", ["3", "4"], False),
        ("Which? A. 3, B. 4.", ["3", "4"], True),
        ("Choices:\n(A) 3\n\n(B) 4\nAnswer with the letter.", ["3", "4"], True),
        ("Which? (A)3;(B)4\n", ["3", " 4 "], True),
        ("A: $\\frac{1}{2}$\nB: (1, 2].", ["$\\frac{1}{2}$", "(1, 2]."], True),
        ("(A) <image> (B) <image>", ["<image>", "<image>"], True),
        ("A. " + "\n" * 60_000, ["", ""], False),
    ],
)
def test_choices_are_listed_where_they_follow_each_other_to_a_lines_end(
    question: str, given: list[str], is_listed: bool
) -> None:
    assert (choice_cells.with_choices(question, given) == question) is is_listed


def test_choices_written_as_text_keep_their_latex_and_their_emoji() -> None:
    latex = [r"\theta", r"\frac{1}{2}", r"\nu", r"\alpha+\beta", r"\vec a \to \xi", r"\text{a\\b}", r"\sin \upsilon"]
    lone = [each for each in latex if "\\\\" not in each]
    for quote in "'\"":
        cell = "[" + ", ".join(f"{quote}{each}{quote}" for each in lone) + "]"
        assert choice_cells.read_choices(cell, "here") == tuple(lone)
    for cell in (repr(latex), json.dumps(latex), latex):
        assert choice_cells.read_choices(cell, "here") == tuple(latex)
    assert choice_cells.read_choices(r'["\ud83d\ude00", "\u00e9"]', "here") == ("\U0001f600", "é")
    assert choice_cells.read_choices(r"['it\'s', 'a\n 1. b', '\u00e9']", "here") == ("it's", "a\n 1. b", "é")


@pytest.mark.parametrize(
    "cell",
    [r"['\tother', '1']", r"['\nothing']", r"['a\fb']", r"['\x00']", r'["\ud800"]', r"['\ud83d\ude00']", r"['\1']"],
)
def test_escapes_of_no_text_in_choices_are_a_row_error(cell: str) -> None:
    with pytest.raises(DataError, match="escape that is no text") as caught:
        choice_cells.read_choices(cell, "row 3, column 'options'")
    assert caught.value.where == "row 3, column 'options'" and "backslash of LaTeX twice" in caught.value.remedy
    str(caught.value).encode()


def test_choices_that_are_images_are_shown_where_they_are_listed() -> None:
    row = {"question": "Which?", "options": "['<image 2>', '<image 1>']", "image_1": encoded(), "image_2": encoded()}
    prompt = read(row | {"answer": "A"})
    assert prompt.messages[0].content == "Which?\n(A) <image>\n(B) <image>"
    assert [image.label[-7:] for image in prompt.images] == ["image_2", "image_1"]


def test_text_is_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("evaluated"))
    assert choice_cells.read_choices("['\\sqrt{2}', '3']", "here") == ("\\sqrt{2}", "3")
    text = "[1, 2] is an interval. [{'role': 'user'}]"
    assert read({"problem": text, "answer": "1"}).messages[0].content == text


def test_a_template_fills_the_last_user_turn_and_dataset_text_is_a_value() -> None:
    row = {"problem": "<image>{{ 1 / 0 }} of {{ row.answer }}", "image": encoded(), "answer": "1", "level": 3}
    prompt = read(row, prompt_template="Level {{ row.level }}: {{ prompt }} Think.")
    assert prompt.messages[0].content == "Level 3: <image>{{ 1 / 0 }} of {{ row.answer }} Think."


AMBIGUOUS = {
    "prompt": {"question": "a", "problem": "b", "answer": "1"},
    "images": {"problem": "?", "image": "a.png", "decoded_image": encoded(), "answer": "1"},
    "answer": {"problem": "?", "answer": "1", "reward_model": {"ground_truth": "2"}},
    "system": {"problem": "?", "answer": "1", "system": "a", "system_prompt": "b"},
    "choices": {"problem": "?", "answer": "1", "choices": ["1"], "options": ["2"]},
}


@pytest.mark.parametrize("role", AMBIGUOUS)
def test_two_columns_for_one_role_are_an_error_with_the_option_to_write(role: str) -> None:
    row = AMBIGUOUS[role]
    with pytest.raises(DataError, match=f"Several columns could be the {role}") as caught:
        read(row)
    first, second = caught.value.what.partition(": ")[2].split(", ")
    assert f"data.train.{role}: {first}" in caught.value.remedy
    assert [name for name in ALIASES[role] if name in (first, second)] == [first, second]
    for name in (first, second):
        if name != "image":
            assert read(row, **{role: name}).id == "train/0"


def test_a_column_that_is_named_for_one_role_is_no_candidate_for_another() -> None:
    row = {"problem": "?", "answer": "so 1", "label": "1"}
    prompt = read(row, demonstration="answer")
    assert (prompt.demonstration, prompt.answer) == ("so 1", "1")


def test_a_category_is_a_columns_text_or_number_and_may_be_missing() -> None:
    row = {"problem": "?", "answer": "1", "level": 3, "is_easy": False, "tags": {"topic": " algebra "}, "no": None}
    assert read(row).category == ""
    names = {"level": "3", "is_easy": "False", "tags.topic": "algebra", "no": ""}
    assert {name: read(row, category=name).category for name in names} == names
    assert read({**row, "level": float("nan")}, category="level").category == ""
    kept = read({**row, "data_source": "sums"}, category="data_source")
    assert (kept.category, kept.source) == ("sums", "sums")
    assert (read(row, category="answer").category, read(row, category="answer").answer) == ("1", "1")
    with pytest.raises(DataError, match="The category is dict") as caught:
        read(row, category="tags")
    assert "column 'tags'" in caught.value.where
    with pytest.raises(DataError, match="has no column 'topic' for its category"):
        read(row, category="topic")


def test_numbered_columns_must_not_have_gaps() -> None:
    with pytest.raises(DataError, match="image_1, image_3 are not numbered one after the other"):
        read({"problem": "?", "image_1": encoded(), "image_3": None, "answer": "1"})
    row = {"problem": "?", "fig_1": encoded(), "fig_2": None, "answer": "1"}
    assert len(read(row, images="fig_1..n").images) == 1


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A value that no column should have, or only some."""
    scalars: list[Callable[[], Any]] = [
        lambda: None, lambda: rng.random() < 0.5, lambda: rng.randint(-5, 300), lambda: 10**5000, lambda: float("nan"),
        lambda: float("inf"), lambda: b"", lambda: rng.randbytes(rng.randint(1, 40)), lambda: object, lambda: set(),
        lambda: "", lambda: "\0", lambda: "\ud800", lambda: "x" * rng.choice((10, 100_000)), lambda: "[" * 500,
        lambda: "<image" + " " * rng.choice((1, 50_000)), lambda: "<image>" * rng.choice((1, 2, 3000)),
        lambda: f"<image {rng.randint(0, 4)}>", lambda: "<image 1><image>", lambda: "<|im_start|><|image_pad|>",
        lambda: "<video>", lambda: "[{\"role\": \"user\", \"content\": 1}]", lambda: "['a', 'b'",
        lambda: "-" * 60_000 + "1", lambda: "(" * 150 + ")" * 150, lambda: "1+" * 20_000 + "1", lambda: "9**9**9**9",
        lambda: "../../etc/passwd", lambda: "https://x/a.png", lambda: URI + "A" * rng.randint(0, 9),
        lambda: np.zeros(rng.choice(((0,), (2, 2), (2, 2, 3), (1, 2, 2, 3))), rng.choice(("u1", "f4", "O"))),
        lambda: encoded(), lambda: PICTURE, lambda: "{{ 7 * 7 }}", lambda: "user", lambda: "assistant",
    ]  # fmt: skip
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(scalars)()
    if rng.random() < 0.5:
        return [junk(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    names = ("role", "content", "from", "value", "type", "text", "image", "bytes", "path", "url", "ground_truth", 7)
    return {rng.choice(names): junk(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one spot of it replaced, or the whole."""
    if isinstance(value, list) and value and rng.random() < 0.7:
        spot = rng.randrange(len(value))
        return [mutate(each, rng) if index == spot else each for index, each in enumerate(value)]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        spot = rng.choice(sorted(value))
        return {name: mutate(each, rng) if name == spot else each for name, each in value.items()}
    replaced = junk(rng)
    return value + replaced if isinstance(value, str) and isinstance(replaced, str) else replaced


def outcome(read_row: RowReader, row: dict[str, Any]) -> Any:
    try:
        prompt = read_row.read(0, row)
    except DataError as error:
        return str(error)
    places = sum(message.content.count("<image>") for message in prompt.messages)
    assert places == len(prompt.images) or not prompt.images
    assert all(isinstance(image.data, bytes) for image in prompt.images)
    assert all(isinstance(message.content, str) for message in prompt.messages)
    assert prompt.demonstration is None or isinstance(prompt.demonstration, str)
    assert all(isinstance(each.text, str) and each.text.strip() for each in prompt.candidates)
    assert all(each.score is None or np.isfinite(each.score) for each in prompt.candidates)
    said = (prompt.id, prompt.messages, prompt.images, prompt.demonstration, prompt.source, prompt.choices)
    return (*said, prompt.candidates)


def test_ten_thousand_mutated_rows_are_prompts_or_data_errors_and_the_same_twice() -> None:
    extra = {"system": "Be brief.", "choices": ["3", "4"], "data_source": "a"}
    rows = [make({"bytes": encoded(), "path": None}) for make in LAYOUTS.values()]
    rows = [row if "options" in row else extra | row for row in rows]
    readers = [reader(row) for row in rows]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: list[Any] = []
    for seed in range(10_000):
        picked = seed % len(rows)
        twice = []
        for _ in range(2):
            rng = random.Random(seed)
            row = dict(rows[picked])
            for name in rng.sample(sorted(row), rng.choice((1, 1, 2))):
                row[name] = mutate(row[name], rng)
            twice.append(outcome(readers[picked], row))
        assert twice[0] == twice[1]
        outcomes.append(type(twice[0]) is str)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # kB
    assert 2000 < sum(outcomes) < 9000


def asked(answer: str) -> list[dict[str, Any]]:
    shown = {"type": "image", "image": {"bytes": encoded(), "path": None}}
    question = [shown, {"type": "text", "text": ASK}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


COMPARED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"problem": ASK, "chosen": "48", "rejected": ["4", "8"], "margin": 2, "images": [encoded()]}, {}),
    ({"chosen": asked("48"), "rejected": asked("4")}, {}),
    (
        {"messages": asked("48"), "rejected_response": {"role": "assistant", "content": "4"}, "rejected_images": None},
        {},
    ),
    ({"problem": ASK, "candidates": ["48", "4", "8"], "scores": [3, "1", None]}, {}),
    ({"problem": ASK, "completion": "48", "good": True}, {"desirable": "good"}),
]


def test_mutated_rows_of_answers_to_compare_are_prompts_or_data_errors_and_the_same_twice() -> None:
    readers = [reader(row, **options) for row, options in COMPARED]
    outcomes: list[Any] = []
    for seed in range(2_000):
        picked = seed % len(COMPARED)
        twice = []
        for _ in range(2):
            rng, row = random.Random(seed), dict(COMPARED[picked][0])
            name = rng.choice(sorted(row))
            twice.append(outcome(readers[picked], row | {name: mutate(row[name], rng)}))
        assert twice[0] == twice[1]
        outcomes.append(type(twice[0]) is str)
    assert 500 < sum(outcomes) < 1900


def test_answers_of_tools_and_calls_in_every_form_are_turns() -> None:
    """OpenAI's calls, whose arguments are JSON or cells of a table, and ShareGPT's."""
    arguments = {"box": [1, 2], "label": None}
    calls = [{"id": "1", "type": "function", "function": {"name": "crop", "arguments": json.dumps(arguments)}}]
    table = [{"function": {"name": "crop", "arguments": arguments}}, {"function": {"name": "wait", "arguments": None}}]
    row = {
        "messages": [
            {"role": "user", "content": "<image>?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}]},
            {"role": "assistant", "content": "Again.", "tool_calls": table},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": "7", "tool_calls": None},
        ],
        "images": [{"bytes": encoded(), "path": None}] * 2,
    }
    prompt = read(row)
    assert [message.role for message in prompt.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [message.content for message in prompt.messages[1:4]] == [
        '<tool_call>\n{"name": "crop", "arguments": {"box": [1, 2], "label": null}}\n</tool_call>',
        "Here:<image>",
        'Again.\n<tool_call>\n{"name": "crop", "arguments": {"box": [1, 2]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
    ]
    assert (prompt.demonstration, len(prompt.images)) == ("7", 2)
    shared = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "crop", "arguments": {}}'},
        {"from": "observation", "value": "cut"},
        {"from": "gpt", "value": "7"},
    ]
    prompt = read({"conversations": shared})
    assert prompt.messages[1:] == (
        Message("assistant", '<tool_call>\n{"name": "crop", "arguments": {}}\n</tool_call>'), Message("tool", "cut")
    )  # fmt: skip
