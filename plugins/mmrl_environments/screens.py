"""Windows to be operated by clicks, typed texts and scrolling, as agents for graphical interfaces do; all is drawn.

    environment: {name: screens, coordinates: 1000, max_turns: 6, max_images: 6}
    environment: {name: screens, action: "^(.*)$", max_turns: 4}

A row's column ``screen`` is a window (``windows.py``) with its goal, as a mapping or as JSON:

    {"size": [84, 84], "elements": [...], "goal": {"press": "OK", "values": {"City": "Kiel"}}}

The policy reads its task in the prompt, the window as a picture at the prompt's end, and after each action the window
as it is then. A picture that has not changed is not shown again: a text says so, which takes fewer tokens. Earlier
pictures stay in the conversation; ``environment.max_images`` bounds their number, and ``shown`` their size.

An episode ends with the first button that is pressed. Its reward is 1 if that button is ``press`` and every field, list
and check box has the value that ``values`` says or, where that says nothing, the one that it had at the start; else 0.

Without ``action`` the policy calls the tool ``computer_use``, with the arguments that Qwen2.5-VL and Qwen3-VL were
trained with: ``{"action": "left_click", "coordinate": [x, y]}``, ``{"action": "type", "text": "..."}`` and ``{"action":
"scroll", "pixels": -1}``, below 0 for down. With the pattern ``action`` it writes one action as text: ``click(x, y)``,
``type('text')`` or ``scroll('down')``; names and arguments of pyautogui and of UI-TARS are read too, such as
``pyautogui.click(x=3, y=4)`` and ``click(start_box='(3,4)')``. A box is clicked in its middle.

``coordinates: pixels`` are those of the picture that is shown, right for Qwen2.5-VL as long as nothing resizes it: its
sides must be multiples of the model's patches (28 pixels, 32 for Qwen3-VL), within ``data.min_pixels`` and
``data.max_pixels``. A number, such as 1000 for Qwen3-VL, is the coordinate of the right and the lower edge.

No text of a policy is an error: one that cannot be read is answered with what is possible, and costs ``penalty``.
Nothing is random, so equal turns give equal screens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmrl.errors import DataError
from mmrl.interfaces import Environment, PluginConfig, Tool, ToolError
from mmrl.types import Call, Observation, Prompt, Turn
from mmrl_environments.actions import ActionPattern, last_action, text_of
from mmrl_environments.pictures import resized
from mmrl_environments.windows import Element, Layout, Side, Text, Window

UNCHANGED = "Nothing has changed."
_FORMS = "click(x, y), type('text') or scroll('down')"
_CLICKS = ("click", "left_click", "left_single", "tap")
_TYPES = ("type", "write", "typewrite", "input_text")
_WRITTEN = re.compile(r"(?:pyautogui\.)?([a-z_]{1,20})\s*(?:\((.*)\)|(?<=\w)\s(.*)|)\s*;?", re.I | re.A | re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,9}(?:\.\d{0,9})?(?![\w.])", re.A)
_OPTIONS = r"(?:\s*,\s*[a-z_]{1,20}\s*=.*)?"
_ARGUMENT = re.compile(
    rf"(?:[a-z_]{{1,20}}\s*=\s*)?(?:(?P<quote>['\"])(?P<quoted>.*?)(?P=quote){_OPTIONS}|(?P<plain>.*))",
    re.I | re.A | re.DOTALL,
)
_BESIDE = re.compile(
    r"(['\"])(?=[^'\"]*[a-z])[^'\"<(]*\1|\b(?![xy]\s*=)[a-z_]{1,20}\s*=\s*[-+]?\d[\d.]*(?=\s*(?:,|\Z))", re.I | re.A
)
"""Words beside the point of a click: a name in quotation marks, and options such as ``clicks=2``."""
_LONGEST = 500
"""Characters of an action's text."""


class Goal(BaseModel):
    """The button that ends the episode well, and values by the names of their elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    press: Text
    values: dict[str, str] = Field(default_factory=dict)


class Task(Layout):
    """A window and its goal, as a row has them."""

    goal: Goal

    @model_validator(mode="after")
    def _can_be_done(self) -> Task:
        elements = {each.name: each for each in self.elements}
        if self.goal.press not in elements or elements[self.goal.press].kind != "button":
            raise ValueError(f"goal.press is {self.goal.press!r}, which is no button of the window")
        for name, value in self.goal.values.items():
            if name not in elements or elements[name].kind == "button":
                raise ValueError(f"goal.values names {name!r}, which is no field, list or check box of the window")
            Element.model_validate({**elements[name].model_dump(), "value": value})
        return self

    def is_done(self, window: Window) -> bool:
        """True if the window was left as the goal says."""
        wanted = {**Window(self).values, **self.goal.values}
        return window.pressed == self.goal.press and window.values == wanted


class Screens(Environment):
    """Operates a drawn window."""

    class Config(PluginConfig):
        column: Annotated[str, Field(min_length=1)] = "screen"
        """Column with the window and its goal, a mapping or JSON."""
        coordinates: Literal["pixels"] | Annotated[float, Field(gt=0, le=1e6)] = "pixels"
        """pixels: of the picture that is shown. A number: the coordinate of its right and lower edge, such as 1000."""
        shown: tuple[Side, Side] | None = None
        """Width and height in pixels in which windows are shown; null is their own size."""
        action: ActionPattern | None = None
        """Regular expression whose group is an action, instead of calls of the tool computer_use."""
        penalty: Annotated[float, Field(le=0, ge=-1e6)] = 0.0
        """Reward of a turn without an action that can be read."""
        blank: bool = False
        """true: pictures are grey. An evaluation then tells what a policy achieves that sees nothing, and only learns
        whether an action has changed the window."""

    config: Config

    def example(self) -> str:
        return "" if self.config.action is None else text_of(self.config.action, "click(8, 8)")

    def tools(self) -> Sequence[Tool]:
        if self.config.action is not None:
            return []
        number = {"type": "number"}
        properties = {
            "action": {"type": "string", "enum": ["left_click", "type", "scroll"]},
            "coordinate": {"type": "array", "items": number, "minItems": 2, "description": "x and y to click at."},
            "text": {"type": "string", "description": "Text to type into the field that was clicked."},
            "pixels": {**number, "description": "Scroll an open list: below 0 down, above 0 up."},
        }
        parameters = {"type": "object", "properties": properties, "required": ["action"]}
        described = "Operate the window that you see. The next picture shows what it has become."
        return [
            {
                "type": "function",
                "function": {"name": "computer_use", "description": described, "parameters": parameters},
            }
        ]

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._task = self._read(prompt)
        self._window = Window(self._task)
        self._last = b""
        return self._look("user")

    async def step(self, turn: Turn) -> Observation:
        if self.config.action is None:
            return await self.run_calls(turn) if turn.calls else self._refused("Call computer_use.", "user")
        written = last_action(self.config.action, turn.text)
        try:
            self._act(*_called(written or ""))
        except ToolError as error:
            return self._refused(str(error), "user")
        return self._look("user")

    def call(self, call: Call) -> Any:
        given = call.arguments or {}
        try:
            if call.name != "computer_use":
                raise ToolError(f"There is no tool {call.name[:40]!r}. Call computer_use.")
            self._act(str(given.get("action"))[:40], given)
        except ToolError as error:
            return self._refused(str(error), "tool")
        return self._look("tool")

    def _read(self, prompt: Prompt) -> Task:
        column = self.config.column
        given = prompt.columns.get(column)
        try:
            return Task.model_validate_json(given) if isinstance(given, str) else Task.model_validate(given)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, each['loc']))} {each['msg']}" for each in error.errors()[:3])
            what = f"the column {column} has no window with a goal: {found}"
            raise DataError(
                what, where=f"row {prompt.id}", remedy="see the head of mmrl_environments.screens"
            ) from error

    def _act(self, name: str, given: Mapping[str, Any]) -> None:
        """Do what an action says.

        Raises:
            ToolError: There is no such action, or it lacks an argument.
        """
        match name:
            case "left_click" | "click":
                self._window.click(*self._point(given.get("coordinate")))
            case "type":
                if not isinstance(text := given.get("text"), str):
                    raise ToolError("type needs text.")
                self._window.type(text)
            case "scroll":
                if not _is_number(pixels := given.get("pixels")) or not pixels:
                    raise ToolError("scroll needs pixels: below 0 for down, above 0 for up.")
                self._window.scroll(pixels < 0)
            case _:
                raise ToolError(f"This is no action: {name[:40]!r}.")

    def _point(self, given: Any) -> tuple[float, float]:
        """A point in pixels of the window."""
        if not isinstance(given, list | tuple) or len(given) not in (2, 4) or not all(map(_is_number, given)):
            raise ToolError("A click needs x and y.")
        x, y = given if len(given) == 2 else ((given[0] + given[2]) / 2, (given[1] + given[3]) / 2)
        size = self._task.size
        edges = (self.config.shown or size) if self.config.coordinates == "pixels" else (self.config.coordinates,) * 2
        if not (0 <= x <= edges[0] and 0 <= y <= edges[1]):  # false for NaN too
            raise ToolError(f"x is from 0 to {edges[0]:g}, and y from 0 to {edges[1]:g}.")
        return x / edges[0] * size[0], y / edges[1] * size[1]

    def _refused(self, why: str, role: Literal["tool", "user"]) -> Observation:
        forms = "" if self.config.action is None else f" Write {_FORMS}."
        return Observation(why + forms, self.config.penalty, role=role)

    def _look(self, role: Literal["tool", "user"]) -> Observation:
        """The window as it is, or that it is as before; its end if a button was pressed."""
        info = {"values": dict(self._window.values), "pressed": self._window.pressed}
        if self._window.pressed:
            return Observation("", float(self._task.is_done(self._window)), True, role, info)
        picture = self._window.draw()
        pixels, before = picture.tobytes(), self._last
        self._last = pixels
        if pixels == before:
            return Observation(UNCHANGED, role=role, info=info)
        if self.config.blank:
            picture.paste("#808080", (0, 0, *picture.size))
        return Observation([resized(picture, self.config.shown or picture.size)], role=role, info=info)


def _called(written: str) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of computer_use for an action that is written as text.

    Raises:
        ToolError: It is none.
    """
    match = _WRITTEN.fullmatch(written[:_LONGEST].strip())
    name, inside = (match[1].lower(), (match[2] or match[3] or "").strip()) if match else ("", "")
    numbers = [float(number) for number in _NUMBER.findall(_BESIDE.sub(" ", inside) if name in _CLICKS else inside)]
    if name in _CLICKS:
        return "left_click", {"coordinate": numbers}
    if name in _TYPES:
        argument = _ARGUMENT.fullmatch(inside)
        text = inside if argument is None else argument["plain"] if argument["quote"] is None else argument["quoted"]
        return "type", {"text": text}
    if name == "scroll":
        words = re.findall(r"\b(?:up|down)\b", inside.lower())
        pixels = {"up": 1.0, "down": -1.0}[words[-1]] if words else numbers[0] if numbers else 0.0
        return "scroll", {"pixels": pixels}
    raise ToolError("This is no action.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
