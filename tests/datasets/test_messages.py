"""Keys of messages, spellings of placeholders, and targets with nothing in them: read, told of, or refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.types import Prompt
from mmrl_datasets.table import Table


def table(folder: Path, *rows: Mapping[str, Any], **options: Any) -> Table:
    """The table of these rows, with red.png and blue.png beside it."""
    for colour in ("red", "blue"):
        buffer = io.BytesIO()
        Image.new("RGB", (28, 28), colour).save(buffer, "PNG")
        (folder / f"{colour}.png").write_bytes(buffer.getvalue())
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Table(Table.Config(path=str(folder / "t.jsonl"), **options))


def read(folder: Path, row: Mapping[str, Any], **options: Any) -> Prompt:
    return table(folder, row, **options).load()[0]


def colours(prompt: Prompt) -> list[str]:
    shown = [Image.open(io.BytesIO(raw.data)).getpixel((0, 0)) for raw in prompt.images]
    return ["red" if pixel == (255, 0, 0) else "blue" for pixel in shown]


PLACED = [
    *("<image> then <image>", "<image 1> then <image 2>", "<image1> then <image2>", "<image_1> then <image_2>"),
    *("<image-1> then <image-2>", "<image_01> then <image_02>", "<Image 1> then <IMAGE_2>", "<img1> then <img_2>"),
    *("<|image_1|> then <|image_2|>", "<|image|> then <|image|>", "<|image_pad|> then <|image_pad|>"),
    *("<img> then <img>", "<img></img> then <img></img>", "<Image> then <Image>", "<IMAGE> then <IMAGE>"),
    "<|vision_start|><|image_pad|><|vision_end|> then <|vision_start|><|image_pad|><|image_pad|><|vision_end|>",
    "<|begin_of_image|><|image|><|end_of_image|> then <|begin_of_image|><|image|><|end_of_image|>",
    "<img><IMG_CONTEXT><IMG_CONTEXT></img> then <img><IMG_CONTEXT></img>",
    *("<IMG_CONTEXT> then <IMG_CONTEXT>", "<image_soft_token> then <image_soft_token>", "[IMG] then [IMG]"),
    *("<start_of_image> then <start_of_image><image_soft_token><end_of_image>", "<image/> then <image />"),
    *("<Img><ImageHere></Img> then <ImageHere>", "<image_placeholder> then <image_placeholder>"),
    *("<image></image> then <image></image>", "<Img> then <IMG>", "<|IMAGE|> then <|IMAGE|>"),
]


@pytest.mark.parametrize("text", PLACED)
def test_placeholders_in_every_spelling_are_the_places_of_their_images(text: str, tmp_path: Path) -> None:
    row = {"problem": f"First {text}?", "images": ["red.png", "blue.png"], "answer": "1"}
    found = table(tmp_path, row)
    [prompt] = found.load()
    assert prompt.messages[0].content == "First <image> then <image>?"
    assert colours(prompt) == ["red", "blue"] and not found.notes()


def test_numbered_placeholders_in_other_spellings_keep_their_numbers(tmp_path: Path) -> None:
    row = {"problem": "<|image_2|> then <image_1>?", "images": ["red.png", "blue.png"], "answer": "1"}
    assert colours(read(tmp_path, row)) == ["blue", "red"]
    with pytest.raises(DataError, match="names <image 3>, which the row does not have"):
        read(tmp_path, row | {"problem": "<image_3>?"})


LEFT = [
    ("<|image|> and <|image|> and <|image|>", ["<|image|>"]),
    ("only <|vision_start|><|image_pad|><|vision_end|>", ["<|vision_start|><|image_pad|><|vision_end|>"]),
    ("What does `<img>` beside `<img>` do?", ["<img>"]),
    ("<p>Text</p> <img> <img>", ["<img>"]),
    ("Compare [image 1] with [image 2]", ["[image 1]", "[image 2]"]),
    ("Here: {image}, {{ image }}", ["{image}"]),
    ("Compare <picture 1> with <figure_2>", ["<picture 1>", "<figure_2>"]),
    ("<image:1> and <image #2>", ["<image:1>", "<image #2>"]),
    ("<im_patch> <image_here> <pic> <fig1>", ["<im_patch>", "<image_here>", "<pic>", "<fig1>"]),
    ("<|image_pad_1|> and <|imgpad|>", ["<|image_pad_1|>", "<|imgpad|>"]),
    ("![](image_1) and ![b](b.png)", ["![](image_1)", "![b](b.png)"]),
    ('What does <img src="a.png"> show?', []),
    ("Is 3 <4 in picture 1> no? Write <answer>, and <topic>", []),
    ("Is a picture of 3 < 4 > 2?", []),
]


@pytest.mark.parametrize(("text", "told"), LEFT, ids=[text for text, _ in LEFT])
def test_spellings_that_fit_no_images_stay_as_they_are_and_are_told(text: str, told: list[str], tmp_path: Path) -> None:
    plain = {"problem": "?", "images": [], "answer": "1"}
    found = table(tmp_path, plain, {"problem": text, "images": ["red.png", "blue.png"], "answer": "1"})
    prompts = found.load()
    assert prompts[1].messages[0].content == f"<image><image>{text}"
    notes = [
        f"texts of column 'problem' hold {each!r} (row 1): it looks like the place of an image, and is read as text; "
        "write <image> at the place of each image"
        for each in told
    ]
    assert list(found.notes()) == notes


def test_texts_without_images_may_speak_of_tags(tmp_path: Path) -> None:
    found = table(tmp_path, {"problem": "What is <img> in HTML, and [image 1]?", "answer": "1"})
    assert found.load()[0].messages[0].content == "What is <img> in HTML, and [image 1]?" and not found.notes()
    found = table(tmp_path, {"problem": "<|image_pad|>?", "answer": "1"})
    assert found.load()[0].messages[0].content == "<|image_pad|>?" and len(found.notes()) == 1


THOUGHTS = ["reasoning_content", "reasoning", "thinking", "thinking_content", "thought", "thoughts"]
SAID = "<think>\nthree and four\n</think>\n\n7"


def chat(**answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"} | answer]}


@pytest.mark.parametrize("key", THOUGHTS)
def test_thoughts_beside_the_answer_stand_before_it_in_tags(key: str, tmp_path: Path) -> None:
    for thoughts in ("three and four", "\nthree and four\n"):
        prompt = read(tmp_path, chat(**{key: thoughts}))
        assert (prompt.demonstration, prompt.answer) == (SAID, "7")
    prompt = read(tmp_path, chat(content=[{"type": key, "text": "three and four"}, {"type": "text", "text": "7"}]))
    assert (prompt.demonstration, prompt.answer) == (SAID, "7")
    for nothing in (None, "", " \n"):
        assert read(tmp_path, chat(**{key: nothing})).demonstration == "7"
    for form in (["three", "and four"], [{"type": "text", "text": "three\nand four"}], {"content": "three\nand four"}):
        assert read(tmp_path, chat(**{key: form})).demonstration == SAID.replace("three ", "three\n")
    found = table(tmp_path, chat(**{key: {"steps": [1]}}))
    assert found.load()[0].demonstration == "7" and f"the key {key!r} (row 0), which is not read" in found.notes()[0]
    own = "<think>mine</think>7"
    assert read(tmp_path, chat(**{key: "three and four"}, content=own)).demonstration == own


def test_thoughts_of_earlier_turns_calls_and_shared_conversations_are_kept(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 3}}
    row = {
        "conversations": [
            {"from": "human", "value": "?"},
            {"from": "gpt", "value": "", "reasoning": "a tool", "tool_calls": [{"function": call}]},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "7", "thought": "so", "reasoning_content": "so"},
        ]
    }
    prompt = read(tmp_path, row)
    assert prompt.messages[1].content.startswith("<think>\na tool\n</think>\n\n<tool_call>")
    assert prompt.demonstration == "<think>\nso\n</think>\n\n7"
    old = {"role": "assistant", "content": None, "function_call": call}
    messages = [{"role": "user", "content": "?"}, old, {"role": "tool", "content": "7"}]
    assert '"name": "add"' in read(tmp_path, {"messages": messages, "answer": "7"}).messages[1].content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<image>A <image>B?", "<image>A <image>B?"),
        ("A?", "<image><image>A?"),
        ("A <image>B<image>", "A <image>B<image>"),
    ],
)
def test_a_messages_own_images_are_shown(text: str, content: str, tmp_path: Path) -> None:
    message = {"role": "user", "content": text, "images": ["red.png", "blue.png"]}
    prompt = read(tmp_path, {"messages": [message], "answer": "1"})
    assert (prompt.messages[0].content, colours(prompt)) == (content, ["red", "blue"])
    with pytest.raises(DataError, match="1 <image> and 2 images of its own"):
        read(tmp_path, {"messages": [message | {"content": "<image>?"}], "answer": "1"})


@pytest.mark.parametrize(
    ("key", "value"), [("name", "Ann"), ("weight", 0), ("tool_calls", "[]"), ("documents", ["a"]), ("reasoning", "hm")]
)
def test_keys_of_messages_that_are_not_read_are_told_once(key: str, value: Any, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "?"}], "answer": "1"}]
    rows += [
        {"messages": [{"role": "user", "content": "?", key: value, "id": "x", "tool_call_id": "y"}], "answer": "1"}
    ] * 2
    found = table(tmp_path, *rows)
    found.load()[:]
    assert list(found.notes()) == [f"messages of column 'messages' have the key {key!r} (row 1), which is not read"]


EMPTY = ["", "  \n", "<think></think>", "<think>\n\n</think>\n\n", "\ufeff", "<reasoning></reasoning> \u200b"]


@pytest.mark.parametrize("text", EMPTY)
def test_empty_targets_are_errors_of_the_row(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'worked' is empty") as caught:
        read(tmp_path, {"problem": "?", "answer": "1", "worked": text}, demonstration="worked")
    assert "row 0" in caught.value.where and caught.value.remedy
    with pytest.raises(DataError, match="last turn is empty"):
        read(tmp_path, chat(content=text))
    with pytest.raises(DataError, match="'solution' is empty"):
        read(tmp_path, {"problem": "?", "solution": text})
    assert read(tmp_path, {"problem": "?", "answer": "1", "solution": text}).demonstration is None
    assert read(tmp_path, chat(content="<think>hm</think>")).demonstration == "<think>hm</think>"
