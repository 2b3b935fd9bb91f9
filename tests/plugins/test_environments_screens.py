"""The environment `screens`: windows and what actions do to them, in every form and scale."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.errors import DataError
from mmrl.testing import check_environment
from mmrl.types import Call, Message, Observation, Prompt, Turn
from mmrl_environments.screens import UNCHANGED, Screens
from mmrl_environments.windows import Layout, Window

ELEMENTS: list[dict[str, Any]] = [
    {"kind": "list", "name": "City", "box": [10, 10, 59, 29], "options": ["Bonn", "Kiel", "Ulm", "Jena", "Hof", "Aue"]},
    {"kind": "field", "name": "Age", "box": [70, 10, 129, 29]},
    {"kind": "check_box", "name": "New", "box": [70, 40, 129, 59]},
    {"kind": "button", "name": "OK", "box": [70, 70, 99, 89]},
    {"kind": "button", "name": "No", "box": [110, 70, 139, 89]},
]
SCREEN = {"size": [140, 100], "elements": ELEMENTS, "goal": {"press": "OK", "values": {"City": "Kiel", "New": "on"}}}


def row(screen: Any = SCREEN) -> Prompt:
    return Prompt("r", (Message("user", "Choose Kiel and tick New."),), (), None, {"screen": screen})


def begun(screen: Any = SCREEN, **options: Any) -> Screens:
    environment = Screens(Screens.Config(**({"action": "^(.*)$"} | options)))
    environment.prepare()
    environment.reset(row(screen), 0)
    return environment


def act(environment: Screens, text: str = "", *calls: Call) -> Observation:
    return asyncio.run(environment.step(Turn(text, calls, 0, "stop", 100)))


def played(*texts: str, **options: Any) -> Observation:
    """The answer to the last of these actions."""
    environment = begun(**options)
    *_, last = (act(environment, text) for text in texts)
    return last


def window(*elements: dict[str, Any]) -> Window:
    return Window(Layout.model_validate({"size": (140, 100), "elements": elements or ELEMENTS}))


RIGHT = ("click(20, 20)", "click(30, 59)", "click(75, 45)", "click(80, 80)")
"""Open the list, choose its second row, tick, press OK."""


def test_an_episode_that_reaches_the_goal_earns_1_at_its_button() -> None:
    environment = begun()
    shown = [act(environment, text) for text in RIGHT]
    assert [each.done for each in shown] == [False, False, False, True]
    assert [each.reward for each in shown] == [0, 0, 0, 1]
    assert shown[-1].info == {"values": {"City": "Kiel", "Age": "", "New": "on"}, "pressed": "OK"}


@pytest.mark.parametrize(
    "texts",
    [
        RIGHT[-1:],  # nothing is set
        (*RIGHT[:2], RIGHT[-1]),  # not ticked
        (*RIGHT[:3], "click(75, 45)", RIGHT[-1]),  # ticked twice
        (*RIGHT[:3], "click(120, 80)"),  # the other button
        ("click(20, 20)", "click(30, 40)", *RIGHT[2:]),  # the first row
        (*RIGHT[:3], "click(80, 20)", "type(7)", RIGHT[-1]),  # a field that the goal leaves as it was
    ],
)
def test_what_is_not_the_goal_earns_nothing(texts: tuple[str, ...]) -> None:
    last = played(*texts)
    assert last.done and last.reward == 0


def test_pixels_at_an_edge_belong_to_the_box_and_the_next_ones_do_not() -> None:
    for x, y in ((70, 40), (129, 40), (70, 59), (129.9, 59.9)):
        ticked = window()
        ticked.click(x, y)
        assert ticked.values["New"] == "on"
    for x, y in ((69.9, 50), (130, 50), (80, 39), (80, 60)):
        missed = window()
        missed.click(x, y)
        assert missed.values["New"] == ""


def test_the_rows_of_an_open_list_lie_below_it_take_clicks_and_scroll() -> None:
    opened = window()
    opened.click(20, 20)
    assert opened.rows() == [("Bonn", (10, 30, 59, 49)), ("Kiel", (10, 50, 59, 69)), ("Ulm", (10, 70, 59, 89))]
    opened.scroll(down=True)
    assert [name for name, _ in opened.rows()] == ["Jena", "Hof", "Aue"]
    opened.scroll(down=True)  # the end stays
    opened.scroll(down=False)
    assert [name for name, _ in opened.rows()] == ["Bonn", "Kiel", "Ulm"]
    opened.click(5, 95)  # beside everything
    assert opened.rows() == [] and opened.values["City"] == ""
    opened.click(20, 20)
    opened.click(20, 20)  # a second click closes it
    assert opened.rows() == []


def test_a_list_without_room_below_opens_above_and_its_rows_hide_what_lies_there() -> None:
    elements = [{**ELEMENTS[0], "box": [10, 70, 59, 89]}, {**ELEMENTS[3], "box": [10, 10, 59, 29]}]
    opened = window(*elements)
    opened.click(20, 80)
    assert [box for _, box in opened.rows()] == [(10, 10, 59, 29), (10, 30, 59, 49), (10, 50, 59, 69)]
    opened.click(20, 20)
    assert (opened.values["City"], opened.pressed) == ("Bonn", "")


def test_a_text_replaces_a_fields_value_right_after_the_click_and_is_added_later() -> None:
    typed = window({**ELEMENTS[1], "value": "old"}, *ELEMENTS[2:])
    typed.type("lost")  # no field has the focus
    typed.click(80, 20)
    typed.type("1")
    typed.type("2")
    assert typed.values["Age"] == "12"
    typed.click(80, 50)
    typed.type("lost")
    assert typed.values["Age"] == "12"
    typed.click(80, 20)
    typed.type("x" * 1000)
    assert typed.values["Age"] == "x" * 200


def test_each_action_changes_the_picture_where_its_element_is() -> None:
    def changed(do: Any) -> set[str]:
        drawn = window()
        before = np.asarray(drawn.draw()).astype(int)
        do(drawn)
        where = np.abs(np.asarray(drawn.draw()) - before).sum(2) > 0
        boxes = {each["name"]: each["box"] for each in ELEMENTS}
        return {name for name, (x0, y0, x1, y1) in boxes.items() if where[y0 : y1 + 1, x0 : x1 + 1].any()}

    assert changed(lambda drawn: drawn.click(80, 50)) == {"New"}
    assert changed(lambda drawn: drawn.click(80, 20)) == {"Age"}
    assert changed(lambda drawn: drawn.click(20, 20)) == {"City"}
    assert changed(lambda drawn: drawn.click(5, 5)) == set()


def test_a_screen_that_has_not_changed_is_told_in_words() -> None:
    environment = begun()
    assert act(environment, "click(1, 1)").content == UNCHANGED
    (picture,) = act(environment, "click(75, 45)").content
    assert picture.size == (140, 100)
    assert act(environment, "scroll(down)").content == UNCHANGED


@pytest.mark.parametrize(
    "text",
    [
        "click(75, 45)", "click 75 45", "CLICK(75.0,45)", "pyautogui.click(x=75, y=45)", "left_click([75, 45])",
        "click(start_box='(75,45)')", "click(point='<point>75 45</point>')", "click(70, 40, 80, 50);",
        "pyautogui.click(75, 45, button='left')", "pyautogui.click(75, 45, clicks=2)", "click('Room 2', 75, 45)",
        'click("New", 75, 45)', "left_click 75 45",
    ],
)  # fmt: skip
def test_clicks_are_read_in_the_forms_that_agents_write(text: str) -> None:
    environment = begun()
    act(environment, text)
    assert environment._window.values["New"] == "on"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("type('a b')", "a b"), ('type(content="a")', "a"), ("write(a)", "a"), ("type 47", "47"), ("type('(')", "(")),
        *(("pyautogui.write('47', interval=0.1)", "47"), ("type('a', 'b')", "a', 'b"), ("type(a, b=1)", "a, b=1")),
    ],
)
def test_texts_are_read_in_the_forms_that_agents_write(text: str, value: str) -> None:
    environment = begun()
    act(environment, "click(80, 20)")
    act(environment, text)
    assert environment._window.values["Age"] == value


@pytest.mark.parametrize(
    "text",
    ["scroll('down')", "scroll(10, 20, 'down')", "scroll(-3)", "scroll(-3, x=30, y=40)", "scroll(direction=down)"],
)
def test_scrolling_is_read_in_the_forms_that_agents_write(text: str) -> None:
    environment = begun()
    for each in ("click(20, 20)", text, "click(30, 40)"):
        act(environment, each)
    assert environment._window.values["City"] == "Jena"


@pytest.mark.parametrize(
    "text",
    [
        "", "?", "click()", "click(5)", "click(1, 2, 3)", "click(141, 5)", "click(-1, 5)", "click(nan, 5)",
        "drag(1, 2)",
        "click(1e9, 1e9)", "click" * 10_000, "click(" + "9" * 30_000 + ")", "scroll()", "scroll(0)", "(" * 30_000,
        "import os; os.system('x')", "click(5, 5" * 3000, "\x00", "type",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_answered_with_what_can_and_changes_nothing(text: str) -> None:
    environment = begun(penalty=-0.5)
    answer = act(environment, text)
    if text == "type":  # an empty text
        assert answer.content == UNCHANGED
    else:
        assert "Write click(x, y)" in answer.content and answer.reward == -0.5
    assert not answer.done and environment._window.values == {"City": "", "Age": "", "New": ""}


@pytest.mark.parametrize(
    ("options", "click"),
    [
        ({"coordinates": 1000}, "click(535.7, 450)"),
        ({"coordinates": "1000"}, "click(535.7, 450)"),
        ({"coordinates": 1}, "click(0.5357, 0.45)"),
        ({"shown": (280, 196)}, "click(150, 88.2)"),
        ({"shown": (280, 196), "coordinates": 1000}, "click(535.7, 450)"),
    ],
)
def test_coordinates_are_of_the_picture_as_it_is_shown(options: dict[str, Any], click: str) -> None:
    environment = begun(**options)
    (picture,) = act(environment, click).content
    assert picture.size == options.get("shown", (140, 100))
    assert environment._window.values["New"] == "on"


def test_blank_pictures_are_grey_and_all_else_is_as_ever() -> None:
    environment = begun(blank=True)
    shown = [act(environment, text) for text in RIGHT]
    for answer in shown[:3]:
        (picture,) = answer.content
        assert picture.size == (140, 100) and np.unique(np.asarray(picture)).tolist() == [128]
    assert shown[-1].reward == 1


def test_the_tool_takes_the_arguments_of_computer_use() -> None:
    environment = begun(action=None)
    calls: list[dict[str, Any]] = [
        {"action": "left_click", "coordinate": [20, 20]},
        {"action": "scroll", "coordinate": [20, 40], "pixels": -100},
        {"action": "left_click", "coordinate": [30, 40]},
        {"action": "left_click", "coordinate": [80, 20]},
        {"action": "type", "text": "47"},
    ]
    for call in calls:
        answer = act(environment, "", Call("computer_use", call))
        assert answer.role == "tool"
    assert environment._window.values == {"City": "Jena", "Age": "47", "New": ""}
    wrongs: list[dict[str, Any]] = [
        {},
        {"action": "type"},
        {"action": "left_click", "coordinate": ["a", 1]},
        {"action": "key"},
    ]
    for wrong in wrongs:
        (told,) = act(environment, "", Call("computer_use", wrong)).content
        assert "needs" in told or "no action" in told
    assert "no tool" in act(environment, "", Call("mouse", {})).content[0]
    assert "Call computer_use" in act(environment, "I am done.").content


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"goal": {"press": "City"}}, "no button"),
        ({"goal": {"press": "OK", "values": {"Town": "x"}}}, "'Town'"),
        ({"goal": {"press": "OK", "values": {"City": "Rome"}}}, "'Rome'"),
        ({"size": [120, 100]}, "not within the window"),
        ({"elements": [*ELEMENTS, {**ELEMENTS[0], "name": "B", "box": [50, 20, 69, 40]}]}, "overlap"),
        ({"elements": [ELEMENTS[0], *ELEMENTS]}, "different names"),
        ({"size": [140, 30], "elements": [ELEMENTS[0], {**ELEMENTS[3], "box": [70, 1, 99, 20]}]}, "no room for a row"),
        ({"elements": [{**ELEMENTS[3], "box": [90, 70, 70, 89]}]}, "x0 < x1"),
        ({"elements": [{**ELEMENTS[3], "options": ["a"]}]}, "lists alone"),
        ({"elements": [{**ELEMENTS[0], "value": "Rome"}]}, "cannot have the value"),
    ],
)
def test_windows_that_cannot_be_are_refused_with_their_row(change: dict[str, Any], told: str) -> None:
    for screen in ({**SCREEN, **change}, json.dumps({**SCREEN, **change})):
        with pytest.raises(DataError, match=told) as caught:
            begun(screen)
        assert "row r" in caught.value.where


@pytest.mark.parametrize("screen", [None, "{", 3, [], {"size": [10**9, 4]}])
def test_a_column_without_a_window_is_refused(screen: Any) -> None:
    with pytest.raises(DataError, match="the column screen"):
        begun(screen)


def test_options_that_cannot_be_are_refused() -> None:
    for options in ({"coordinates": 0}, {"coordinates": "file"}, {"shown": (2, 2)}, {"action": "(a)(b)"}):
        with pytest.raises(ValidationError):
            Screens.Config(**options)


@pytest.mark.parametrize("options", [{}, {"action": "^(.*)$"}, {"coordinates": 1000, "shown": [280, 196]}])
def test_equal_turns_give_equal_screens_in_every_worker(options: dict[str, Any]) -> None:
    script = list(RIGHT) if "action" in options else None
    check_environment("screens", [row()], options=options, script=script)
