"""Makes a prompt of a table's row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from mmrl.data.templates import PromptTemplate
from mmrl.errors import DataError
from mmrl.types import IMAGE_PLACEHOLDER, THOUGHT_NAMES, Candidate, Message, Prompt, RawImage
from mmrl_datasets.choice_cells import read_choices, with_choices
from mmrl_datasets.columns import Columns
from mmrl_datasets.comparisons import Answer, read_answers, refuse_images, shared_turns
from mmrl_datasets.images import image_cells, read_image
from mmrl_datasets.names import lookup
from mmrl_datasets.options import TableOptions
from mmrl_datasets.placeholders import place_images, respelled
from mmrl_datasets.turns import InlineImage, Turn, question_of, read_document, read_turns, refused_media

Cells = Mapping[str, Any]
_MOST_NOTES = 20
_PLACE = f"{IMAGE_PLACEHOLDER} at the place of each image"
_EMPTY_THOUGHTS = re.compile(rf"<({THOUGHT_NAMES})>\s*</\1>")
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff]")


@dataclass(frozen=True, slots=True)
class _Talk:
    """The turns of a row, and the answers to compare after them.

    Attributes:
        column: The column of the turns.
        turns: The turns up to the question.
        ending: The assistant's turn after it, if there is one.
        answers: Answers to compare.
    """

    column: str
    turns: tuple[Turn, ...]
    ending: Turn | None
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class _Row:
    """A row on its way to a prompt."""

    number: int
    cells: Cells
    where: str


class RowReader:
    """Makes prompts of rows.

    Args:
        config: The table's options.
        columns: The column of each role.
        split: Part of every prompt's id.
        folders: The folders that image paths may point into, if any.
        adapt: Changes a row's cells before they are read.

    Attributes:
        has_read: True after a row was read.
        left_out: Things that rows have and that were not read, each with the first such row.
    """

    def __init__(
        self,
        config: TableOptions,
        columns: Columns,
        split: str,
        folders: Sequence[Path],
        adapt: Callable[[dict[str, Any], str], dict[str, Any]] = lambda cells, where: cells,
    ) -> None:
        self._config = config
        self._columns = columns
        self._split = split
        self._folders = folders
        self._adapt = adapt
        self.has_read, self.left_out = False, dict[tuple[str, str], int]()
        template = config.prompt_template
        self._template = None if template is None else PromptTemplate(template, "the dataset's prompt_template")

    def read(self, number: int, cells: dict[str, Any]) -> Prompt:
        """The prompt of row ``number``.

        Raises:
            DataError: The row cannot be used; names row and column.
        """
        self.has_read = True
        where = f"{self._config.path}, split {self._split}, row {number}"
        row = _Row(number, self._adapt(dict(cells), where), where)
        self._refuse_media(row)
        if self._columns.document is not None:
            return self._document(row, self._columns.document)
        talk = self._talk(row)
        turns, ending = self._with_system(row, talk.turns), talk.ending
        choices = self._choices(row)
        if self._config.list_choices:
            turns = _list_choices(turns, choices)
        messages, images = self._placed(row, turns, talk.column)
        plain = self._plain(cells, turns)
        demonstration = self._demonstration(row, ending)
        return Prompt(
            id=f"{self._split}/{number}",
            messages=self._filled(messages, plain, where, has_images=bool(images)),
            images=images,
            answer=self._answer(row, None if ending is None else ending.answer, demonstration),
            columns=plain,
            demonstration=demonstration,
            source=self._text(row, self._columns.source) or "",
            choices=choices,
            candidates=tuple(Candidate(answer.turn.text, answer.score) for answer in talk.answers),
            category=self._category(row),
        )

    def _document(self, row: _Row, column: str) -> Prompt:
        """A row that is learned as a whole."""
        turn = read_document(lookup(row.cells, column), column, row.where)
        if _is_empty(turn.text.replace(IMAGE_PLACEHOLDER, "")):
            raise _null(row, column, "without a text")
        messages, images = self._placed(row, (turn,), column)
        return Prompt(
            id=f"{self._split}/{row.number}",
            messages=messages,
            images=images,
            columns={name: cell for name, cell in self._plain(row.cells, (turn,)).items() if name != column},
            source=self._text(row, self._columns.source) or "",
            category=self._category(row),
        )

    def _refuse_media(self, row: _Row) -> None:
        for column in self._columns.refused:
            if _is_there(row.cells.get(column)):
                raise refused_media(column.rstrip("s"), f"{row.where}, column {column!r}")

    def _talk(self, row: _Row) -> _Talk:
        """The turns up to the question, and what the row has after it."""
        column, compared = self._columns.prompt, self._columns.compared
        if compared is None:
            return self._divided(row, column, read_turns(lookup(row.cells, column), column, row.where))
        answers = read_answers(row.cells, compared, row.where)
        before, held = shared_turns(answers), next((each for each in answers if each.before), None)
        if held is not None:
            self._check_answers(row, answers, before)
            talk = self._divided(row, held.column, (*before, held.turn))
            if column not in compared.answers:
                self._check_question(row, talk.turns)
                talk = replace(talk, ending=None)
            return replace(talk, answers=answers)
        where = f"{row.where}, column {column!r}"
        if column in compared.answers:
            possible = "a conversation that ends with the answer"
            raise DataError("The cell holds an answer and no question", where=where, possible=possible)
        talk = self._divided(row, column, read_turns(lookup(row.cells, column), column, row.where))
        if talk.ending is not None:
            raise DataError("The conversation ends with an answer, and others are to be compared", where=where)
        self._check_answers(row, answers, talk.turns)
        return replace(talk, answers=answers)

    def _check_answers(self, row: _Row, answers: Sequence[Answer], turns: Sequence[Turn]) -> None:
        """Raise if an answer after these turns is empty or shows an image."""
        refuse_images(answers, is_placed=self._has_images(row, turns))
        for answer in answers:
            self._tell_unread((answer.turn,), answer.column, row)
            if _is_empty(answer.turn.text):
                raise DataError("The answer is empty", where=answer.where, remedy="fill it or remove the row")

    def _check_question(self, row: _Row, turns: Sequence[Turn]) -> None:
        """Raise if the prompt is neither a question of the answers' conversations nor all turns before the answers."""
        column = self._columns.prompt
        if (cell := lookup(row.cells, column)) is None:
            return
        said, told = (
            [(turn.role, turn.text.replace(IMAGE_PLACEHOLDER, "").strip()) for turn in each]
            for each in (read_turns(cell, column, row.where), turns)
        )
        if said != told and not (len(said) == 1 and said[0] in told):
            raise DataError(
                "The prompt differs from the turns before the answers",
                where=f"{row.where}, column {column!r}",
                remedy="correct the row, or name the column of these conversations as the prompt",
            )

    def _tell_unread(self, turns: Sequence[Turn], column: str, row: _Row) -> None:
        for key in (key for turn in turns for key in turn.unread):
            self._leave_out(f"messages of column {column!r} have the key {key!r}", ", which is not read", row)

    def _divided(self, row: _Row, column: str, turns: tuple[Turn, ...]) -> _Talk:
        """The turns up to the question, and the assistant's turn after it, if there is one."""
        where = f"{row.where}, column {column!r}"
        self._tell_unread(turns, column, row)
        ending = None
        if turns[-1].role == "assistant":
            *before, ending = turns
            turns = tuple(before)
            is_placed = IMAGE_PLACEHOLDER in ending.text and self._has_images(row, before)
            if is_placed or any(isinstance(piece, InlineImage) for piece in ending.pieces):
                raise DataError("The assistant's last turn shows an image", where=where, possible="text")
            if _is_empty(ending.text):
                raise DataError("The assistant's last turn is empty", where=where, remedy="fill it or remove the row")
        question = question_of(turns)
        if question is None:
            raise DataError("There is no question: the conversation has no user turn at its end", where=where)
        if not any(not isinstance(piece, str) or piece.strip() for piece in turns[question].pieces):
            raise DataError("The question is empty", where=where)
        return _Talk(column, turns, ending)

    def _has_images(self, row: _Row, turns: Sequence[Turn]) -> bool:
        """True if a row shows an image; none is read."""
        cells = (cell for column in self._columns.images for cell in image_cells(lookup(row.cells, column)))
        inline = any(isinstance(piece, InlineImage) for turn in turns for piece in turn.pieces)
        return inline or next(cells, None) is not None

    def _with_system(self, row: _Row, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        system = self._text(row, self._columns.system)
        if not system:
            return turns
        if any(turn.role == "system" for turn in turns):
            raise DataError(
                "The row has a system message and a system prompt",
                where=f"{row.where}, column {self._columns.system!r}",
                remedy='use one of them; system: "" leaves the column out',
            )
        return (Turn("system", (system,)), *turns)

    def _choices(self, row: _Row) -> tuple[str, ...]:
        column = self._columns.choices
        return read_choices(lookup(row.cells, column), f"{row.where}, column {column!r}") if column else ()

    def _placed(
        self, row: _Row, turns: Sequence[Turn], column: str
    ) -> tuple[tuple[Message, ...], tuple[RawImage, ...]]:
        prompt = f"{row.where}, {column}"
        cells = [piece.cell for turn in turns for piece in turn.pieces if isinstance(piece, InlineImage)]
        inline = [read_image(cell, self._folders, f"{prompt}[image {i}]") for i, cell in enumerate(cells)]
        where, images = f"{row.where}, column {column!r}", self._images(row)
        turns, left = respelled(turns, sum(image is not None for image in images))
        for spelling in left:
            what = f"texts of column {column!r} hold {spelling[:50]!r}"
            self._leave_out(what, f": it looks like the place of an image, and is read as text; write {_PLACE}", row)
        return place_images(turns, inline, images, where, self._config.unused_images)

    def _leave_out(self, what: str, told: str, row: _Row) -> None:
        if len(self.left_out) < _MOST_NOTES:
            self.left_out.setdefault((what, told), row.number)

    def _images(self, row: _Row) -> list[RawImage | None]:
        if len(self._columns.images) > 1:
            return [self._single_image(row, column) for column in self._columns.images]
        return [
            read_image(cell, self._folders, f"{row.where}, {column}[{index}]")
            for column in self._columns.images
            for index, cell in enumerate(image_cells(lookup(row.cells, column)))
            if cell is not None or self._columns.document is None  # there a list has null beside each text
        ]

    def _single_image(self, row: _Row, column: str) -> RawImage | None:
        """The image of one of several numbered columns."""
        label, cells = f"{row.where}, {column}", image_cells(row.cells.get(column))
        if len(cells) > 1:
            raise DataError(f"A numbered column holds {len(cells)} images", where=label, possible="one, or null")
        return read_image(cells[0], self._folders, label) if cells else None

    def _plain(self, cells: Cells, turns: Sequence[Turn]) -> dict[str, Any]:
        """All columns but images, as they are; without the conversation, where those stand in it."""
        has_inline = any(isinstance(piece, InlineImage) for turn in turns for piece in turn.pieces)
        compared = self._columns.compared.answers if self._columns.compared else ()
        aside = {name.partition(".")[0] for name in (self._columns.prompt, *compared)} if has_inline else set()
        return {name: cells[name] for name in self._columns.plain if name not in aside}

    def _filled(
        self, messages: tuple[Message, ...], plain: Cells, where: str, *, has_images: bool
    ) -> tuple[Message, ...]:
        if self._template is None:
            return messages
        at = question_of(messages)
        assert at is not None, "rows without a question are refused"
        text = self._template.fill(messages[at].content, plain, where, has_images=has_images)
        filled = replace(messages[at], content=text)
        return (*messages[:at], filled, *messages[at + 1 :])

    def _answer(self, row: _Row, ending: str | None, demonstration: str | None) -> Any:
        column = self._columns.answer
        if column is None:
            if self._columns.wants_answer and ending is None and demonstration is None:
                raise DataError(
                    "The row has no answer",
                    where=f"{row.where}, column {self._columns.prompt!r}",
                    possible="an answer column, or a last turn of the assistant",
                    remedy='set answer: "" if none is needed',
                )
            return ending
        value = lookup(row.cells, column)
        if value is None or (isinstance(value, float) and isnan(value)):  # some writers say null so
            raise _null(row, column)
        if isinstance(value, (bytes, bytearray, memoryview)):
            raise DataError(
                f"Column {column!r} holds {type(value).__name__}, not an answer",
                where=row.where,
                possible="text, a number, or a list",
            )
        return value

    def _demonstration(self, row: _Row, ending: Turn | None) -> str | None:
        """The completion to imitate. Only a column that the user named must hold text in every row.

        Raises:
            DataError: It is named, and null or empty.
        """
        column = self._columns.demonstration
        if column is not None and "demonstration" in self._columns.named:
            text = self._text(row, column)
            if text is None:
                raise _null(row, column)
            if _is_empty(text):
                raise _null(row, column, "empty")
            return text
        found = lookup(row.cells, column) if column is not None and ending is None else ending and ending.text
        if not isinstance(found, str) or not _is_empty(found):
            return found if isinstance(found, str) else None
        if column is not None and column == self._columns.answer:
            raise _null(row, column, "empty")
        return None

    def _category(self, row: _Row) -> str:
        """The row's category as text; empty where the cell is null or blank."""
        column = self._columns.category
        value = None if column is None else lookup(row.cells, column)
        if value is not None and not isinstance(value, str | int | float):
            raise DataError(
                f"The category is {type(value).__name__}",
                where=f"{row.where}, column {column!r}",
                possible="text, a number, true or false; null where there is none",
            )
        return "" if value is None or value != value else str(value).strip()

    def _text(self, row: _Row, column: str | None) -> str | None:
        value = None if column is None else lookup(row.cells, column)
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"Column {column!r} holds {type(value).__name__}, not text",
                where=row.where,
                remedy="name the right column with an option; the README of datasets/ lists them",
            )
        return value


def _list_choices(turns: tuple[Turn, ...], choices: Sequence[str]) -> tuple[Turn, ...]:
    """The turns with the choices after the question."""
    at = question_of(turns) or 0
    asked = turns[at]
    listed = with_choices(asked.text, choices)
    return (*turns[:at], replace(asked, pieces=(*asked.pieces, listed[len(asked.text) :])), *turns[at + 1 :])


def _is_there(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_there(inner) for inner in value.values())
    return value is not None and not (isinstance(value, (str, list)) and not value)


def _is_empty(text: str) -> bool:
    """True if nothing is said in it, whether or not nothing was thought before."""
    return not _EMPTY_THOUGHTS.sub("", _INVISIBLE.sub("", text)).strip()


def _null(row: _Row, column: str, what: str = "null") -> DataError:
    return DataError(f"Column {column!r} is {what}", where=row.where, remedy="fill the cell or remove the row")
