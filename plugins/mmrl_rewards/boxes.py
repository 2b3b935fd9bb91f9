"""Boxes in references and answers, in any of the forms in use, and what rewards that compare them have in common.

Boxes may be ``[x1, y1, x2, y2]``, ``{"bbox_2d": [...]}`` (or ``bbox``, ``box``), ``{"x1": ...}``, ``{"x": ..., "y":
..., "width": ..., "height": ...}``, ``[[x1, y1], [x2, y2]]``, lists of these, as JSON (also in a code fence) or as
numbers in brackets in a text, ``(x1,y1),(x2,y2)`` included; a text of four numbers alone is a box too. Numbers may be
quoted, and a fifth one from 0 to 1, a detector's score, is left out. ``boxes: xywh`` reads four bare numbers as corner,
width and height. Corners may be in any order. The answer is what is in the last answer tags, code fence or LaTeX box,
else all of the completion but its thinking; where that has none, what follows after "the answer is".

``reference_scale`` and ``answer_scale`` say what the numbers are in (``box_scale.py``); without them they are compared
as they are. Boxes are of one of the prompt's images; where the two scales need its size, a rollout without it is
unscorable, and one of an older record, which lacks the file's size, is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import EncodedPrompt, ImageRef
from mmrl_rewards.answers import last_boxed, last_tagged, unmarked_answer
from mmrl_rewards.box_scale import Box, BoxedRow, Scale, factors, warnings_about

_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "boxes", "bboxes", "objects")
_MAPPINGS = ((("x1", "y1", "x2", "y2"), False), (("x", "y", "width", "height"), True), (("x", "y", "w", "h"), True))
NUMBER = r"\s*(-?\d{1,9}(?:\.\d{1,20})?)\s*"
FOUR = re.compile(rf"[\[(]{NUMBER},{NUMBER}(?:,|\)\s*,\s*\(){NUMBER},{NUMBER}[\])]")
_ALONE = re.compile(rf"{NUMBER}[,\s]{NUMBER}[,\s]{NUMBER}[,\s]{NUMBER}")
_WHOLE = re.compile(NUMBER)
_FENCE = re.compile(r"```(?:json)?\s")
_DEPTH = 8
_SMALLEST = 1e-6
"""Width or height of a box; smaller ones have no area."""


class BoxReward(Reward):
    """Compares the answer with reference boxes."""

    class Config(PluginConfig):
        boxes: Literal["xyxy", "xywh"] = "xyxy"
        """Meaning of four bare numbers in references and answers: two corners, or a corner, width and height."""
        reference_scale: Scale | None = None
        """Coordinates of reference boxes: file (pixels of the dataset's file, as viewers show it), resized (pixels of
        the picture that the model sees), or the number at which they end, such as 1000 or 1; null: as answers."""
        answer_scale: Scale | None = None
        """Coordinates of answers, such as resized for Qwen2.5-VL and 1000 for Qwen3-VL and InternVL."""
        image: int = Field(default=1, ge=1)
        """Number of the prompt's image that boxes are of, from 1."""
        max_characters: int = Field(default=20_000, gt=0)
        """Longer answers score 0."""

        @model_validator(mode="after")
        def _scales_are_said_together(self) -> BoxReward.Config:
            if (self.reference_scale is None) != (self.answer_scale is None):
                raise ValueError("needs reference_scale and answer_scale together: file, resized, 1000 or 1 each")
            return self

    config: Config

    def check_rows(self, prompts: Sequence[EncodedPrompt]) -> Sequence[str]:
        boxed = [(each, boxes) for each in prompts if (boxes := self.references(each.prompt.answer))]
        place, found = self.config.image - 1, list[str]()
        rows = [
            BoxedRow(each.id, each.prompt.answer, boxes, each.images[place])
            for each, boxes in boxed
            if place < len(each.images)
        ]
        found += warnings_about(rows, self.config.reference_scale)
        if lacking := [each.id for each, _ in boxed if self.factors_for(each.images) is None]:
            what = f"{len(lacking)} of {len(boxed)} rows have boxes and no image {place + 1}, such as {lacking[0]}"
            found.append(f"{what}, and cannot be scored: set image, or leave them out")
        several = [each.id for each, _ in boxed if len({ref.file_size for ref in each.images}) > 1]
        if several and self.config.reference_scale and "image" not in self.config.model_fields_set:
            what = f"{len(several)} of {len(boxed)} rows have images of different sizes, such as {several[0]}"
            found.append(f"{what}, and their boxes are read as the first one's: set image, its number from 1")
        return found

    def factors_for(self, images: Sequence[ImageRef]) -> tuple[float, float] | None:
        """Factors that make a reference's x and y an answer's; None without the image that they depend on."""
        return factors(self.config.reference_scale, self.config.answer_scale, images, self.config.image - 1)

    def references(self, answer: Any) -> list[Box]:
        """The reference boxes, if one of them has an area."""
        boxes = self.boxes_in(answer)
        return boxes if any(map(_has_area, boxes)) else []

    def boxes_in(self, given: Any) -> list[Box]:
        """The boxes of a reference or of an answer's text."""
        return boxes_of(given, is_xywh=self.config.boxes == "xywh")


def readings(text: str) -> Iterator[str]:
    """The texts that may hold the answer's boxes: the marked one, then what the text says to be the answer."""
    tagged = last_tagged(text)
    marked = text if tagged is None else tagged
    *_, last = _FENCE.split(marked) if "```" in marked else [marked]
    boxed = last_boxed(last)
    yield (last if boxed is None else boxed).split("```")[0].strip()
    yield unmarked_answer(text) or ""


def boxes_of(given: Any, *, is_xywh: bool = False) -> list[Box]:
    """Every box in a reference, in an answer's text or in a JSON value, in order."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str):
        tagged = last_tagged(given)
        text = (given if tagged is None else tagged).strip()
        given = as_json(text)
        if given is None:
            alone = _ALONE.fullmatch(text)
            found = [alone.groups()] if alone else FOUR.findall(text)
            given = [[float(number) for number in numbers] for numbers in found]
    return list(_found(given, is_xywh))


def as_json(text: str) -> Any:
    """The JSON value that a text is; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _found(value: Any, is_xywh: bool, depth: int = 0) -> Iterator[Box]:
    """Every box, in order; one of numbers that are none or too large has no area."""
    if depth > _DEPTH:
        return
    if isinstance(value, str) and depth and (alone := _ALONE.fullmatch(value)):
        value = alone.groups()
    if isinstance(value, Mapping):
        yield from _in_mapping(value, is_xywh, depth)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [number_of(item) for item in value]
        if len(numbers) == 5 and numbers[4] is not None and 0 <= numbers[4] <= 1:
            numbers = numbers[:4]
        if len(numbers) == 4 and None not in numbers:
            yield _box([number for number in numbers if number is not None], is_xywh)
        elif len(numbers) == 4 and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
            yield (0.0, 0.0, 0.0, 0.0)
        elif len(corners := [_point(item) for item in value]) == 2 and all(corners):
            yield _box([number for corner in corners for number in corner], is_xywh=False)
        else:
            for item in value:
                yield from _found(item, is_xywh, depth + 1)


def _point(value: Any) -> list[float]:
    """x and y; empty if the value is no pair of numbers."""
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    numbers = [number for item in value if (number := number_of(item)) is not None] if is_pair else []
    return numbers if len(numbers) == 2 else []


def _in_mapping(value: Mapping[Any, Any], is_xywh: bool, depth: int) -> Iterator[Box]:
    for keys, sized in _MAPPINGS:
        numbers = [number_of(value.get(key)) for key in keys]
        if None not in numbers:
            yield _box([number for number in numbers if number is not None], sized)
            return
    for key in _KEYS:
        if key in value:
            yield from _found(value[key], is_xywh, depth + 1)
            return


def _box(numbers: list[float], is_xywh: bool) -> Box:
    x, y, right, bottom = numbers
    if is_xywh:
        right, bottom = x + right, y + bottom
    return min(x, right), min(y, bottom), max(x, right), max(y, bottom)


def _has_area(box: Box) -> bool:
    return box[2] - box[0] > _SMALLEST and box[3] - box[1] > _SMALLEST


def number_of(value: Any) -> float | None:
    """A finite number below 1e9, which may be quoted; None if it is none."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e9 else None
