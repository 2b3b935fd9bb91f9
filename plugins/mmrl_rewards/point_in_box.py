"""1 for a completion whose point lies in a reference box, else 0: the measure of benchmarks for grounding.

ScreenSpot (SeeClick, arXiv:2401.10935, section 4) and those after it count a click as right if it lies within the
element's box. ``tolerance`` enlarges the box on all sides; a point on its edge is within. Where the row has several
boxes, each is right.

A point may be ``[x, y]``, ``{"point_2d": [x, y]}`` (or ``point``, ``coordinate``, ``position``, ``click``), ``{"x":
..., "y": ...}``, or the arguments of a tool call with one of these, as JSON (also in a code fence); in a text ``(x,
y)``, ``x=..., y=...``, ``<point>x y</point>`` or two numbers alone. So ``click(x, y)``, ``click(OK, x, y)``,
``pyautogui.click(x=3, y=4)``, ``click(start_box='(3,4)')`` and a call of ``computer_use`` are read. A box stands for
its middle, as those benchmarks take it. Only one point counts: an answer with several different ones scores 0, as a
policy could otherwise click everywhere.

``boxes.py`` says where the answer is looked for, how reference boxes may be written, and in which scale all of this is.
``boxes`` is the form of references; four bare numbers of an answer are two corners. A rollout whose reference holds no
box with an area is unscorable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from mmrl.types import EncodedPrompt, Rollout, Score
from mmrl_rewards.answers import first_read, reply_text
from mmrl_rewards.box_scale import Box
from mmrl_rewards.boxes import FOUR, NUMBER, BoxReward, as_json, boxes_of, number_of, readings

Place = tuple[float, float]
_KEYS = ("point_2d", "point", "points", "coordinate", "coordinates", "position", "click", "start_box")
_DEEPER = ("arguments", "parameters", "action", "actions", "inputs", "action_inputs", "args")
_DEPTH = 8
_NAME = r"\(\s*(?:[^\W\d]\w{0,40}|'[^'\n]{1,80}'|\"[^\"\n]{1,80}\")\s*,"
_OPTIONS = r"(?:,\s*[a-z_]{1,20}\s*=[^()\n]{0,40})?"
_PAIR = re.compile(
    rf"(?:[\[(]|{_NAME}){NUMBER},{NUMBER}{_OPTIONS}[\])]|\bx\s*[=:]{NUMBER},\s*y\s*[=:]{NUMBER}"
    rf"|<point>{NUMBER}[\s,]{NUMBER}</point>|(?:\b|_)click {NUMBER}[\s,]{NUMBER}(?![\d.])"
)
_ALONE = re.compile(rf"{NUMBER}[,\s]{NUMBER}")
_ROUNDING = 1e-9


class PointInBox(BoxReward):
    """A point in a reference box."""

    class Config(BoxReward.Config):
        tolerance: float = Field(default=0.0, ge=0, le=1e6)
        """Distance by which a point may lie beside the box, horizontally and vertically, in the answer's scale."""

    config: Config

    def score_one(self, rollout: Rollout) -> Score | None:
        reference, by = self.references(rollout.answer), self.factors_for(rollout.images)
        if not reference or by is None:
            return None
        points = first_read(readings(reply_text(rollout)), self._pointed) or []
        if len(points) != 1:
            return 0.0
        slack = self.config.tolerance + _ROUNDING * max(1.0, *map(abs, points[0]))
        low_high = np.array(reference) * (*by, *by) + (-slack, -slack, slack, slack)
        point = np.array(points[0])
        return float(((low_high[:, :2] <= point) & (point <= low_high[:, 2:])).all(1).any())

    def right_answer(self, prompt: EncodedPrompt) -> str | None:
        reference, by = self.references(prompt.prompt.answer), self.factors_for(prompt.images)
        if not reference or by is None:
            return None
        x0, y0, x1, y1 = reference[0]
        return f"({(x0 + x1) / 2 * by[0]:.6g}, {(y0 + y1) / 2 * by[1]:.6g})"

    def _pointed(self, text: str) -> list[Place] | None:
        """The different points of an answer; None if it has none."""
        if len(text) > self.config.max_characters:
            return None
        return list(dict.fromkeys(points_in(text))) or None


def points_in(text: str) -> Iterator[Place]:
    """The points that a text names, in order; boxes by their middles."""
    value = as_json(text)
    if value is not None and (found := list(_in_value(value, 0))):
        yield from found
    elif alone := _ALONE.fullmatch(text):
        yield _point(alone.groups())
    else:
        yield from (_middle(numbers) for numbers in boxes_of(text))
        yield from (_point([each for each in found.groups() if each]) for found in _PAIR.finditer(FOUR.sub(" ", text)))


def _in_value(value: Any, depth: int) -> Iterator[Place]:
    """The points in a JSON value."""
    if depth > _DEPTH:
        return
    if isinstance(value, str) and depth:
        yield from points_in(value)
    elif isinstance(value, Mapping):
        x, y = number_of(value.get("x")), number_of(value.get("y"))
        keys = [key for key in (*_KEYS, *_DEEPER) if key in value]
        if x is not None and y is not None and "width" not in value and "w" not in value:
            yield x, y
        elif keys:
            for key in keys:
                yield from _in_value(value[key], depth + 1)
        else:
            yield from map(_middle, boxes_of(value))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [number_of(item) for item in value]
        if len(numbers) == 2 and None not in numbers:
            yield from [(x, y) for x, y in [numbers] if x is not None and y is not None]
        elif boxes := boxes_of(value) if None not in numbers else []:
            yield from map(_middle, boxes)
        else:
            for item in value:
                yield from _in_value(item, depth + 1)


def _point(numbers: Sequence[str]) -> Place:
    x, y = map(float, numbers)
    return x, y


def _middle(box: Box) -> Place:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
