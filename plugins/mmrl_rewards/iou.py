"""The overlap of a completion's boxes with the reference boxes, 0 to 1: intersections over unions, matched one to one.

Intersection over union is PASCAL VOC's measure (Everingham et al., IJCV 2010, doi:10.1007/s11263-009-0275-4, section
4.2); several boxes are matched so that the sum is largest (the assignment problem). The score is that sum over the
larger number of boxes, so that extra and missing boxes cost the same; a box without an area counts, and overlaps none.
With ``threshold``, a matched pair counts 1 if it reaches it, else 0.

Boxes of references and answers may be ``[x1, y1, x2, y2]``, ``{"bbox_2d": [...]}`` (or ``bbox``, ``box``), ``{"x1":
...}``, ``{"x": ..., "y": ..., "width": ..., "height": ...}``, ``[[x1, y1], [x2, y2]]``, lists of these, as JSON (also
in a code fence) or as numbers in brackets in a text, ``(x1,y1),(x2,y2)`` included; a text of four numbers alone is a
box too. Numbers may be quoted, and a fifth one from 0 to 1, a detector's score, is left out. ``boxes: xywh`` reads four
bare numbers as corner, width and height. Corners may be in any order. The answer is what is in the last answer tags,
code fence or LaTeX box, else all of the completion but its thinking; where that has no box, what follows after "the
answer is". A rollout whose reference holds no box with an area is unscorable.

``reference_scale`` and ``answer_scale`` say what the numbers are in (``box_scale.py``); without them they are compared
as they are. Boxes are of one of the prompt's images; where the two scales need its size, a rollout without it is
unscorable, and one of an older record, which lacks the file's size, is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mmrl.errors import ConfigError
from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import EncodedPrompt, FloatArray, ImageRef, Rollout, Score
from mmrl_rewards.answers import first_read, last_boxed, last_tagged, reply_text, unmarked_answer
from mmrl_rewards.box_scale import Box, BoxedRow, Scale, factors, warnings_about

_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "boxes", "bboxes", "objects")
_MAPPINGS = ((("x1", "y1", "x2", "y2"), False), (("x", "y", "width", "height"), True), (("x", "y", "w", "h"), True))
_N = r"\s*(-?\d{1,9}(?:\.\d{1,20})?)\s*"
_FOUR = re.compile(rf"[\[(]{_N},{_N}(?:,|\)\s*,\s*\(){_N},{_N}[\])]")
_ALONE = re.compile(rf"{_N}[,\s]{_N}[,\s]{_N}[,\s]{_N}")
_NUMBER = re.compile(_N)
_FENCE = re.compile(r"```(?:json)?\s")
_DEPTH = 8
_SMALLEST = 1e-6
"""Width or height of a box; smaller ones have no area."""
_ROUNDING = 1e-9


class IoU(Reward):
    """Overlap with the reference boxes."""

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
        threshold: float | None = Field(default=None, gt=0, le=1)
        """Overlap from which a box counts as found; null: the overlap itself is the score."""
        max_boxes: int = Field(default=100, gt=0)
        """Answers with more boxes score 0."""
        max_characters: int = Field(default=20_000, gt=0)
        """Longer answers score 0."""

        @model_validator(mode="after")
        def _scales_are_said_together(self) -> IoU.Config:
            if (self.reference_scale is None) != (self.answer_scale is None):
                raise ValueError("needs reference_scale and answer_scale together: file, resized, 1000 or 1 each")
            return self

    def prepare(self) -> None:
        _matching()

    def score_one(self, rollout: Rollout) -> Score | None:
        reference, by = self._references(rollout.answer), self._factors(rollout.images)
        if not reference or by is None:
            return None
        found = first_read(_readings(reply_text(rollout)), self._answered) or []
        if not 0 < len(found) <= self.config.max_boxes:
            return 0.0
        return self._score(np.array(reference) * (*by, *by), np.array(found))

    def check_rows(self, prompts: Sequence[EncodedPrompt]) -> Sequence[str]:
        boxed = [(each, boxes) for each in prompts if (boxes := self._references(each.prompt.answer))]
        place, found = self.config.image - 1, list[str]()
        rows = [
            BoxedRow(each.id, each.prompt.answer, boxes, each.images[place])
            for each, boxes in boxed
            if place < len(each.images)
        ]
        found += warnings_about(rows, self.config.reference_scale)
        if lacking := [each.id for each, _ in boxed if self._factors(each.images) is None]:
            what = f"{len(lacking)} of {len(boxed)} rows have boxes and no image {place + 1}, such as {lacking[0]}"
            found.append(f"{what}, and cannot be scored: set image, or leave them out")
        several = [each.id for each, _ in boxed if len({ref.file_size for ref in each.images}) > 1]
        if several and self.config.reference_scale and "image" not in self.config.model_fields_set:
            what = f"{len(several)} of {len(boxed)} rows have images of different sizes, such as {several[0]}"
            found.append(f"{what}, and their boxes are read as the first one's: set image, its number from 1")
        return found

    def right_answer(self, prompt: EncodedPrompt) -> str | None:
        reference, by = self._references(prompt.prompt.answer), self._factors(prompt.images)
        if not reference or by is None or by == (1.0, 1.0):
            return None
        boxes = np.array(reference) * (*by, *by)
        if self.config.boxes == "xywh":
            boxes[:, 2:] -= boxes[:, :2]
        return json.dumps(boxes.round(6).tolist() if len(boxes) > 1 else boxes[0].round(6).tolist())

    def _factors(self, images: Sequence[ImageRef]) -> tuple[float, float] | None:
        return factors(self.config.reference_scale, self.config.answer_scale, images, self.config.image - 1)

    def _references(self, answer: Any) -> list[Box]:
        """The reference boxes, if one of them has an area."""
        boxes = self._boxes(answer)
        return boxes if any(map(_has_area, boxes)) else []

    def _score(self, reference: FloatArray, found: FloatArray) -> float:
        overlap = overlaps(reference, found)
        if self.config.threshold is not None:
            overlap = (overlap >= self.config.threshold).astype(float)
        rows, columns = _matching()(overlap, maximize=True)
        return float(overlap[rows, columns].sum() / max(overlap.shape))

    def _answered(self, text: str) -> list[Box] | None:
        return (self._boxes(text) or None) if len(text) <= self.config.max_characters else None

    def _boxes(self, given: Any) -> list[Box]:
        if hasattr(given, "tolist"):
            given = given.tolist()
        if isinstance(given, str):
            given = _parsed(given)
        return list(_found(given, self.config.boxes == "xywh"))


def _matching() -> Callable[..., Any]:
    """SciPy's solution of the assignment problem.

    Raises:
        ConfigError: SciPy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        what = "the reward iou matches boxes with the package scipy, which is not installed"
        raise ConfigError(what, where="rewards: iou", remedy="pip install 'mmrl-train[iou]'") from error
    found: Callable[..., Any] = linear_sum_assignment
    return found


def overlaps(one: FloatArray, other: FloatArray) -> FloatArray:
    """(N, M) intersections over unions of boxes (N, 4) and (M, 4)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (one, other)]
    union: FloatArray = areas[0][:, None] + areas[1][None, :] - shared
    shares: FloatArray = np.where(shared > 0, shared / np.where(union > 0, union, 1), 0)
    # Boxes that were rescaled are off by the last digits, and accuracy is the share of value 1.
    shares[shares > 1 - _ROUNDING] = 1
    return shares


def _readings(text: str) -> Iterator[str]:
    """The texts that may hold the answer's boxes: the marked one, then what the text says to be the answer."""
    tagged = last_tagged(text)
    marked = text if tagged is None else tagged
    *_, last = _FENCE.split(marked) if "```" in marked else [marked]
    boxed = last_boxed(last)
    yield (last if boxed is None else boxed).split("```")[0].strip()
    yield unmarked_answer(text) or ""


def _parsed(text: str) -> Any:
    """The JSON that a text is, or the boxes in it."""
    tagged = last_tagged(text)
    text = (text if tagged is None else tagged).strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        alone = _ALONE.fullmatch(text)
        found = [alone.groups()] if alone else _FOUR.findall(text)
        return [[float(number) for number in numbers] for numbers in found]


def _found(value: Any, is_xywh: bool, depth: int = 0) -> Iterator[Box]:
    """Every box, in order; one of numbers that are none or too large has no area."""
    if depth > _DEPTH:
        return
    if isinstance(value, str) and depth and (alone := _ALONE.fullmatch(value)):
        value = alone.groups()
    if isinstance(value, Mapping):
        yield from _in_mapping(value, is_xywh, depth)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [_number(item) for item in value]
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
    numbers = [number for item in value if (number := _number(item)) is not None] if is_pair else []
    return numbers if len(numbers) == 2 else []


def _in_mapping(value: Mapping[Any, Any], is_xywh: bool, depth: int) -> Iterator[Box]:
    for keys, sized in _MAPPINGS:
        numbers = [_number(value.get(key)) for key in keys]
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


def _number(value: Any) -> float | None:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e9 else None
