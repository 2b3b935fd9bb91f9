"""The environment `zoom`: what it cuts from the prompt's images, and what it says to a call that does not fit."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mmrl.types import Call, Message, Observation, Prompt, RawImage, Turn
from mmrl_environments.zoom import Zoom


def raw(pixels: np.ndarray) -> RawImage:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return RawImage(file.getvalue(), "a test's image")


def gradient(width: int, height: int) -> np.ndarray:
    """Red is the column, green the row; blue tells images apart."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0], pixels[:, :, 1] = np.arange(width), np.arange(height)[:, None]
    return pixels


def other(width: int, height: int) -> np.ndarray:
    pixels = gradient(width, height)
    pixels[:, :, 2] = 255
    return pixels


PROMPT = Prompt("p", (Message("user", "<image><image>?"),), (raw(gradient(200, 100)), raw(other(80, 80))))


def begin(prompt: Prompt = PROMPT, **options) -> Zoom:
    zoom = Zoom(Zoom.Config(**({"min_side": 1} | options)))
    zoom.prepare()
    zoom.reset(prompt, 0)
    return zoom


def turn(text: str = "", *calls: Call) -> Turn:
    return Turn(text, calls, 0, "stop", 100)


def ask(zoom: Zoom, text: str = "", *calls: Call) -> Observation:
    return asyncio.run(zoom.step(turn(text, *calls)))


def pixels(observation: Observation) -> np.ndarray:
    (picture,) = observation.content
    return np.asarray(picture)


def test_a_part_is_cut_from_the_full_image():
    zoom = begin()
    found = ask(zoom, "", Call("crop", {"x0": 100, "y0": 200, "x1": 300, "y1": 500}))
    np.testing.assert_array_equal(pixels(found), gradient(200, 100)[20:50, 20:60])
    assert not found.done and found.info == {"box": [20, 20, 60, 50], "image": 1}
    found = ask(zoom, "", Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1000, "image": 2}))
    np.testing.assert_array_equal(pixels(found), other(80, 80))
    in_pixels = begin(coordinates="pixels")
    found = ask(in_pixels, "", Call("crop", {"x0": "20", "y0": 20.0, "x1": 60, "y1": 50}))
    np.testing.assert_array_equal(pixels(found), gradient(200, 100)[20:50, 20:60])


def test_pixels_are_told_where_they_are_the_coordinates():
    assert begin().reset(PROMPT, 0) is None
    told = begin(coordinates="pixels").reset(PROMPT, 0)
    assert told is not None and told.content == "Image 1: 200x100 pixels.\nImage 2: 80x80 pixels."


@pytest.mark.parametrize("options", [{"grid": 4}, {}, {"tools": ["rotate"]}, {"tools": ["mark", "crop"]}])
def test_its_example_is_an_action(options):
    zoom = begin(action="<zoom>(.*?)</zoom>", **options)
    found = ask(zoom, zoom.example())
    assert not found.done and not isinstance(found.content, str) and pixels(found).size
    assert begin(**options).example() == ""


def test_cells_are_numbered_from_1_row_by_row():
    zoom = begin(grid=4)
    for number, rows, columns in ((1, (0, 25), (0, 50)), (4, (0, 25), (150, 200)), (7, (25, 50), (100, 150))):
        expected = gradient(200, 100)[slice(*rows), slice(*columns)]
        np.testing.assert_array_equal(pixels(ask(zoom, "", Call("cell", {"number": number}))), expected)
    written = begin(grid=4, action="<zoom>(.*?)</zoom>")
    assert written.tools() == []
    seven = gradient(200, 100)[25:50, 100:150]
    np.testing.assert_array_equal(pixels(ask(written, "<zoom>2</zoom> no, <zoom> 7 </zoom>")), seven)
    np.testing.assert_array_equal(pixels(ask(written, "<zoom>cell 7, 1</zoom>")), seven)
    np.testing.assert_array_equal(pixels(ask(written, "<zoom>16 2</zoom>")), other(80, 80)[60:, 60:])
    assert ask(written, "it is 7").done


def test_a_small_part_is_enlarged_and_a_large_one_shrunk():
    found = ask(begin(min_side=60), "", Call("crop", {"x0": 0, "y0": 0, "x1": 100, "y1": 100}))  # 20x10
    assert found.content[0].size == (120, 60)
    found = ask(begin(max_pixels=5000), "", Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1000}))
    assert found.content[0].size == (100, 50)
    found = ask(begin(min_side=1000, max_pixels=800), "", Call("mark", {"x": 0, "y": 0}))
    assert found.content[0].size == (40, 20)


def test_a_turn_is_clockwise_and_a_mark_is_where_the_point_is():
    turned = pixels(ask(begin(), "", Call("rotate", {"degrees": 90})))
    np.testing.assert_array_equal(turned, np.rot90(gradient(200, 100), -1))
    marked = pixels(ask(begin(), "", Call("mark", {"x": 500, "y": 500})))
    red = np.argwhere((marked == (255, 0, 0)).all(-1))
    np.testing.assert_allclose(red.mean(0), (50, 100), atol=1)
    assert len(red) > 10 and abs(red - (50, 100)).max() <= 6
    untouched = pixels(ask(begin(), "", Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1000})))
    np.testing.assert_array_equal(untouched, gradient(200, 100))


WRONG = [
    (Call("crop", {"x0": 0, "y0": 0, "x1": 0, "y1": 10}), "x0 must be less than x1"),
    (Call("crop", {"x0": 0, "y0": 0, "x1": 1001, "y1": 10}), "x is from 0 to 1000"),
    (Call("crop", {"x0": float("nan"), "y0": 0, "x1": 10, "y1": 10}), "x is from 0 to 1000"),
    (Call("crop", {"x0": 10**400, "y0": 0, "x1": 10, "y1": 10}), "x0: "),
    (Call("crop", {"x0": "left", "y0": 0, "x1": 10, "y1": 10}), "x0: "),
    (Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 10, "image": 3}), "image: from 1 to 2"),
    (Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1}), "too narrow"),
    (Call("crop", {"x0": 0, "y0": 0}), "missing a required argument"),
    (Call("crop", {"path": "/etc/passwd"}), "crop: "),
    (Call("crop", {"x0": 0, "y0": 0, "x1": 9, "y1": 9, "image": "/etc/passwd"}), "image: "),
    (Call("rotate", {"degrees": 1e9}), "degrees is from"),
    (Call("mark", {"x": {}, "y": []}), "mark: "),
    (Call("step", {"turn": 1}), "There is no tool 'step'. Tools: crop, rotate, mark."),
    (Call("x" * 10**6, {}), "There is no tool"),
    (Call("", None, "This is no JSON."), "This is no JSON."),
    (Call("crop", None), "missing a required argument"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=range(len(WRONG)))
def test_a_call_that_does_not_fit_is_answered_with_what_is_possible(call, said):
    found = ask(begin(), "", call)
    (text,) = found.content
    assert said in text and len(text) < 300 and not found.done and found.reward == 0


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "Write number."), ("left", "Write number."), ("0", "from 1 to 16"), ("17", "from 1 to 16"),
        ("2.5", "number: "), ("1 2 3", "Write number."), ("rotate 90", "There is no tool 'rotate'"),
        ("9" * 10**4, "Write number."), ("(" * 10**4, "Write number."), ("\ud800\x1b[2J<|im_end|>", "Write number."),
        ("1 9", "image: from 1 to 2"), ("٣", "Write number."),
    ],
)  # fmt: skip
def test_an_action_that_cannot_be_read_is_answered_with_what_is_possible(written, said):
    found = ask(begin(grid=4, action="<zoom>(.*?)</zoom>"), f"<zoom>{written}</zoom>")
    assert said in found.content and len(found.content) < 300 and not found.done


def test_a_policy_names_images_by_number_and_never_a_file(tmp_path, monkeypatch):
    (tmp_path / "1").write_bytes(PROMPT.images[0].data)
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("builtins.open", lambda *arguments, **options: opened.append(arguments))
    for image in (str(tmp_path / "1"), "./1", "../1", "file:1", "/etc/passwd"):
        found = ask(begin(), "", Call("mark", {"x": 1, "y": 1, "image": image}))
        assert "image: " in found.content[0]
        assert isinstance(ask(begin(action="<z>(.*?)</z>", tools=["mark"]), f"<z>1 1 {image}</z>").content, str)
    assert opened == []


def test_episodes_of_one_prompt_share_nothing_and_a_prompt_without_images_is_told_so():
    one = begin()
    ask(one, "", Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1000}))
    one.reset(Prompt("q", (Message("user", "?"),)), 0)
    found = ask(one, "", Call("crop", {"x0": 0, "y0": 0, "x1": 1000, "y1": 1000}))
    assert found.content == ["image: there is no image in the question."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["cell"]}, "the tool cell needs grid"),
        ({"tools": ["crop"], "grid": 3}, "grid is for the tool cell"),
        ({"tools": ["fly"]}, "crop"),
        ({"action": "<zoom>.*</zoom>"}, "0 groups"),
        ({"action": "("}, "no regular expression"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Zoom.Config(**options)


def test_the_policys_template_can_show_the_tools():
    from transformers.utils import get_json_schema

    schemas = [
        get_json_schema(tool)["function"] for tool in begin(tools=["crop", "cell", "rotate", "mark"], grid=2).tools()
    ]
    assert [each["name"] for each in schemas] == ["crop", "cell", "rotate", "mark"]
    assert schemas[1]["parameters"]["required"] == ["number"]
    assert schemas[0]["parameters"]["properties"]["x0"] == {"type": "number", "description": "Left edge."}
