"""Reads answers that are compared under one prompt and one set of images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER
from mmrl_datasets.compared import ComparedColumns
from mmrl_datasets.glances import is_filled
from mmrl_datasets.lookalikes import is_conversation
from mmrl_datasets.names import lookup
from mmrl_datasets.turns import InlineImage, Turn, read_turns

_VERDICTS: Mapping[Any, float] = {
    True: 1.0, False: 0.0, "true": 1.0, "false": 0.0, "True": 1.0, "False": 0.0, "1": 1.0, "0": 0.0,
}  # fmt: skip
_POSSIBLE = "this version compares answers under one prompt and one set of images"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a row.

    Attributes:
        turn: The assistant's turn.
        before: The turns before it in its own cell; none if the cell holds the answer alone.
        column: The column that it stands in.
        where: Row and column, for messages.
        score: Its quality; None if it is not known.
    """

    turn: Turn
    before: tuple[Turn, ...]
    column: str
    where: str
    score: float | None = None


def read_answers(cells: Mapping[str, Any], columns: ComparedColumns, where: str) -> tuple[Answer, ...]:
    """The answers of a row, with their scores.

    Raises:
        DataError: An answer or a score is missing or cannot be used; names row and column.
    """
    for column in columns.own_images:
        if is_filled(cells.get(column)):
            raise _own_images(f"{where}, column {column!r}")
    roles = columns.roles
    if columns.answer is not None:
        return (_scored(_single(cells, columns.answer, where), _verdict(cells, roles["desirable"], where)),)
    if "candidates" in roles:
        return _graded(cells, roles["candidates"], roles["scores"], where)
    best = _margin(cells, roles["margin"], where) if "margin" in roles else 1.0
    chosen = [_scored(each, best) for each in _several(cells, roles["chosen"], where)]
    return (*chosen, *(_scored(each, 0.0) for each in _several(cells, roles["rejected"], where)))


def shared_turns(answers: Sequence[Answer]) -> tuple[Turn, ...]:
    """The turns before the answers; none if the cells hold answers alone.

    Raises:
        DataError: They differ from answer to answer.
    """
    told = [answer for answer in answers if answer.before]
    for other in told[1:]:
        place = _first_difference(told[0].before, other.before)
        if place is not None:
            what = f"The turns before the answers differ from message {place} on"
            remedy = "make these turns equal, or remove the row"
            raise DataError(what, where=other.where, possible=_POSSIBLE, remedy=remedy)
    return told[0].before if told else ()


def _first_difference(turns: Sequence[Turn], others: Sequence[Turn]) -> int | None:
    """The place of the first turn that differs; None if all are equal. Images that are arrays are never equal."""
    for place, (one, other) in enumerate(zip(turns, others, strict=False)):
        with suppress(ValueError):
            if one == other:
                continue
        return place
    return None if len(turns) == len(others) else min(len(turns), len(others))


def refuse_images(answers: Sequence[Answer], *, is_placed: bool) -> None:
    """Raise if an answer shows an image.

    Args:
        answers: The answers of a row.
        is_placed: True if an ``<image>`` in a text would be the place of one.

    Raises:
        DataError: One does.
    """
    for answer in answers:
        if any(isinstance(piece, InlineImage) for piece in answer.turn.pieces) or (
            is_placed and IMAGE_PLACEHOLDER in answer.turn.text
        ):
            raise _own_images(answer.where)


def _own_images(where: str) -> DataError:
    return DataError(
        "An answer has images of its own", where=where, possible=_POSSIBLE, remedy="leave the cell empty or the row out"
    )


def _scored(answer: Answer, score: float | None) -> Answer:
    return replace(answer, score=score)


def _several(cells: Mapping[str, Any], column: str, where: str) -> list[Answer]:
    """The answers of a cell: one, or a list."""
    cell, place = lookup(cells, column), f"{where}, column {column!r}"
    if isinstance(cell, list) and not is_conversation(cell):
        if not cell:
            raise DataError("There is no answer: the list is empty", where=place, remedy="fill it or remove the row")
        return [_read(each, column, where, f"{place}[{index}]") for index, each in enumerate(cell)]
    return [_read(cell, column, where, place)]


def _single(cells: Mapping[str, Any], column: str, where: str) -> Answer:
    return _read(lookup(cells, column), column, where, f"{where}, column {column!r}")


def _read(cell: Any, column: str, where: str, place: str) -> Answer:
    """The answer that is a text, a message, or the end of a conversation."""
    if isinstance(cell, Mapping):
        cell = [cell]
    if not isinstance(cell, str | list):
        what = "null" if cell is None else f"of type {type(cell).__name__}"
        possible = "text, a message, or a conversation that ends with the answer"
        raise DataError(f"The answer is {what}", where=place, possible=possible, remedy="fill it or remove the row")
    turns = read_turns(cell, column, where)
    if turns == (Turn("user", (cell,)),):  # type: ignore[arg-type]
        return Answer(Turn("assistant", (str(cell),)), (), column, place)
    if turns[-1].role != "assistant":
        raise DataError(
            f"The last turn is the {turns[-1].role}'s, and no answer",
            where=place,
            possible="a conversation that ends with a turn of the assistant",
            remedy="add the answer as the last turn, or remove the row",
        )
    return Answer(turns[-1], turns[:-1], column, place)


def _graded(cells: Mapping[str, Any], candidates: str, scores: str, where: str) -> tuple[Answer, ...]:
    """The answers of a list, with the scores of another."""
    texts, grades = (_listed(lookup(cells, column), f"{where}, column {column!r}") for column in (candidates, scores))
    if len(texts) != len(grades):
        what = f"There are {len(texts)} answers and {len(grades)} scores"
        raise DataError(what, where=f"{where}, columns {candidates!r} and {scores!r}", possible="one score per answer")
    if len(texts) < 2:
        what = "There is one answer" if texts else "There is no answer"
        raise DataError(
            f"{what}, and nothing to compare it with",
            where=f"{where}, column {candidates!r}",
            remedy="remove the row; desirable: COLUMN says of single answers whether they are good",
        )
    read = [_read(each, candidates, where, f"{where}, column {candidates!r}[{i}]") for i, each in enumerate(texts)]
    given = [_number(each, f"{where}, column {scores!r}[{i}]") for i, each in enumerate(grades)]
    return tuple(_scored(answer, score) for answer, score in zip(read, given, strict=True))


def _listed(cell: Any, where: str) -> list[Any]:
    """A list, also as JSON text, as csv tables have it."""
    if isinstance(cell, str):
        with suppress(ValueError, RecursionError):
            cell = json.loads(cell)
    if not isinstance(cell, list):
        what = f"The cell holds {type(cell).__name__}, and no list"
        raise DataError(what, where=where, possible="a list for each row")
    return cell


def _number(value: Any, where: str) -> float | None:
    """A score; text of one too."""
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, bool | int | float | str) else float("nan")
    except (ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        raise DataError(f"The score is no finite number: {_shown(value)}", where=where, possible="a number, or null")
    return number


def _margin(cells: Mapping[str, Any], column: str, where: str) -> float:
    where = f"{where}, column {column!r}"
    margin = _number(lookup(cells, column), where)
    if margin is None or margin < 0:
        what = "null" if margin is None else f"{margin:g}, so that the rejected answer would be the better one"
        raise DataError(f"The margin is {what}", where=where, possible="a number from 0", remedy="correct the cell")
    return margin


def _verdict(cells: Mapping[str, Any], column: str, where: str) -> float:
    value = lookup(cells, column)
    score = _VERDICTS.get(value) if isinstance(value, bool | int | float | str) else None
    if score is None:
        what = f"The verdict on the answer is {_shown(value)}"
        raise DataError(what, where=f"{where}, column {column!r}", possible="true or false, 1 or 0")
    return score


def _shown(value: Any) -> str:
    """The start of a text or number; the type of anything else, and of numbers that are too long to be written."""
    if isinstance(value, str):
        return repr(value[:50])
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    return "null" if value is None else type(value).__name__
