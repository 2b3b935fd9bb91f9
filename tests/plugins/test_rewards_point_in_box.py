"""The reward `point_in_box`: forms of answers, edges, tolerance, several points, and boxes in the scales of models."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mmrl.rollout.rewards.worker import call
from mmrl.testing import check_reward
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import EncodedPrompt, ImageRef
from mmrl_rewards.point_in_box import PointInBox

SCREEN = ImageRef("a" * 64, 644, 364, "a.png", (1920, 1080))
"""As Qwen2.5-VL sees it, and as the dataset has it."""
BOX = [480, 270, 960, 540]
"""In pixels of the file: a quarter to a half of both sides."""


def made(**options: Any) -> PointInBox:
    return PointInBox(PointInBox.Config(**options))


def scored(text: str, answer: Any = (10, 20, 30, 40), *images: ImageRef, **options: Any) -> float | None:
    scores: Any = call(made(**options), make_rollouts([text], answer=answer, images=images))
    return float(scores[0]) if scores[0] is not None else None


def prompt(answer: Any, *images: ImageRef) -> EncodedPrompt:
    return make_rollouts(["7"], answer=answer, images=images)[0].prompt


@pytest.mark.parametrize(
    "text",
    [
        "(15, 25)", "[15, 25]", "15 25", "15, 25", '{"point_2d": [15, 25], "label": "OK"}', '[{"point_2d": [15, 25]}]',
        '{"x": 15, "y": 25}', "click(15, 25)", "click(OK,15,25)", "pyautogui.click(x=15, y=25)",
        "pyautogui.click(15, 25, button='left')", "click(15, 25, clicks=2)", "click('Room 2', 15, 25)",
        'click("Send mail", 15, 25)', "click 15 25", "left_click 15 25",
        "click(start_box='(15,25)')", "Action: click(start_box='<|box_start|>(15,25)<|box_end|>')",
        "<point>15 25</point>", "[10, 20, 20, 30]", '```json\n{"bbox_2d": [10, 20, 20, 30]}\n```',
        "<think>It may be (99, 99).</think> click(15, 25)", "I looked at (99, 99). <answer>(15, 25)</answer>",
        r"\boxed{(15, 25)}", "The answer is (15, 25).", "click(15, 25), once more: click(15, 25)",
        '<tool_call>\n{"name": "mouse", "arguments": {"action": "left_click", "coordinate": [15, 25]}}\n</tool_call>',
        '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [15, 25]}}',
        '{"action": "click(15, 25)"}', "x: 15, y: 25",
    ],
)  # fmt: skip
def test_a_point_is_read_in_every_form(text: str) -> None:
    assert scored(text) == 1
    assert scored(text, [100, 100, 120, 120]) == 0


@pytest.mark.parametrize(
    ("x", "y", "tolerance", "expected"),
    [
        (10, 20, 0, 1), (30, 40, 0, 1), (30, 20, 0, 1),  # corners
        (9.99, 30, 0, 0), (30.01, 30, 0, 0), (20, 19.99, 0, 0), (20, 40.01, 0, 0),
        (8, 30, 2, 1), (7.99, 30, 2, 0), (32, 42, 2, 1), (32, 42.01, 2, 0),
        (9.5, 30, 0.5, 1), (20, 30, 0, 1), (20, 30, 5, 1),
    ],
)  # fmt: skip
def test_a_point_on_the_edge_is_within_and_the_tolerance_moves_the_edge(
    x: float, y: float, tolerance: float, expected: int
) -> None:
    assert scored(f"click({x}, {y})", tolerance=tolerance) == expected


@pytest.mark.parametrize(
    "text",
    [
        "click(15, 25) click(50, 60)", "[[15, 25], [50, 60]]", "(15, 25), (15, 26), (15, 27)",
        "(1, 1, 60, 60), (15, 25)",
        '[{"point_2d": [15, 25]}, {"point_2d": [16, 25]}]', " ".join(f"({x}, {x + 10})" for x in range(60)),
    ],
)  # fmt: skip
def test_several_points_are_no_answer(text: str) -> None:
    assert scored(text) == 0


@pytest.mark.parametrize(
    "text",
    [
        "", "click()", "click(15)", "(15, 25", "15", "(15, 25, 35)", "(nan, nan)", "(1e400, 25)", "(inf, 25)",
        '{"point_2d": [15]}', '{"point_2d": [true, 25]}', '{"x": 15}', "[" * 5000, '{"action":' * 3000, "(" * 20_000,
        "(1," * 6000, "<point>15" * 2000, "x=1" * 6000, "(15, 25) " + "." * 20_000, "9" * 20_000, "()\x00",
    ],
)  # fmt: skip
def test_what_is_no_point_earns_nothing_and_takes_no_time(text: str) -> None:
    began = time.process_time()
    assert scored(text) == 0
    assert time.process_time() - began < 2


@pytest.mark.parametrize("answer", [None, "no box", [], [1, 1, 1, 5], [5, 5], "7"])
def test_a_row_without_a_box_cannot_be_scored(answer: Any) -> None:
    assert scored("(15, 25)", answer) is None


def test_each_of_several_boxes_is_right() -> None:
    boxes = [[10, 20, 30, 40], [100, 100, 120, 120]]
    assert [scored(text, boxes) for text in ("(15, 25)", "(110, 110)", "(60, 60)")] == [1, 1, 0]


@pytest.mark.parametrize(
    ("scale", "inside", "outside"),
    [
        ("resized", "(161, 91)", "(160, 91)"),  # 480 / 1920 * 644 = 161, 270 / 1080 * 364 = 91
        ("resized", "(322, 182)", "(323, 182)"),
        (1000, "(250, 250)", "(249, 250)"),
        (1000, "(500, 500)", "(500, 501)"),
        (1, "(0.25, 0.5)", "(0.25, 0.51)"),
        ("file", "(480, 540)", "(479, 540)"),
    ],
)
def test_boxes_of_the_file_are_compared_in_the_scale_of_answers(scale: Any, inside: str, outside: str) -> None:
    options = {"reference_scale": "file", "answer_scale": scale}
    assert scored(inside, BOX, SCREEN, **options) == 1
    assert scored(outside, BOX, SCREEN, **options) == 0


def test_tolerance_is_in_the_scale_of_answers() -> None:
    by_thousand = {"reference_scale": "file", "answer_scale": 1000, "tolerance": 14}
    assert scored("(236, 250)", BOX, SCREEN, **by_thousand) == 1  # 14 thousandths are 27 pixels of the file
    assert scored("(235, 250)", BOX, SCREEN, **by_thousand) == 0


def test_references_by_size_are_boxes_and_answers_stay_corners() -> None:
    """ScreenSpot's boxes are corner, width and height."""
    options = {"boxes": "xywh", "reference_scale": "file", "answer_scale": "resized"}
    given = [480, 270, 480, 270]
    assert scored("(322, 182)", given, SCREEN, **options) == 1
    assert scored("(323, 182)", given, SCREEN, **options) == 0
    assert scored("[161, 91, 322, 182]", given, SCREEN, **options) == 1  # the middle of two corners


def test_a_right_answer_is_the_middle_in_the_scale_of_answers() -> None:
    reward = made(reference_scale="file", answer_scale="resized")
    assert reward.right_answer(prompt(BOX, SCREEN)) == "(241.5, 136.5)"
    assert scored("(241.5, 136.5)", BOX, SCREEN, reference_scale="file", answer_scale="resized") == 1
    assert made().right_answer(prompt([10, 20, 30, 40])) == "(20, 30)"
    assert made().right_answer(prompt("7")) is None


def test_rows_with_boxes_outside_of_their_picture_are_told() -> None:
    reward = made(reference_scale="file", answer_scale=1000)
    (told,) = reward.check_rows([prompt(BOX, SCREEN), prompt([1900, 900, 2100, 1000], SCREEN)])
    assert "1 of 2 rows" in told and "1920x1080" in told and "contradict" in told
    plain = ImageRef("b" * 64, 84, 84, "b.png", (84, 84))
    (told,) = made().check_rows([prompt([1, 1, 20, 20], plain), prompt([70, 70, 4000, 4000], plain)])
    assert "1 of 2 rows" in told and "beyond" in told and "84x84" in told
    assert made().check_rows([prompt([1, 1, 84, 84], plain)]) == []


def test_the_reward_keeps_the_rules() -> None:
    check_reward("point_in_box", options={"tolerance": 2})
