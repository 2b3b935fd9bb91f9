"""Chooses the columns of a table for each role, by the names that datasets use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from mmrl.errors import DataError
from mmrl_datasets.rows import Rows

NUMBERED = "..n"
ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("problem", "question", "query", "prompt", "instruction", "input", "messages", "conversations"),
    "images": ("images", "image", "decoded_image", f"image_1{NUMBERED}", "image_path", "image_paths"),
    "answer": (
        "answer", "solution", "ground_truth", "gt_answer", "reward_model.ground_truth", "label", "answers", "target"
    ),
    "demonstration": ("solution",),
    "system": ("system", "system_prompt"),
    "choices": ("choices", "options"),
    "source": ("data_source",),
}  # fmt: skip
"""Column names by role; dots lead into structs, and ``image_1..n`` is image_1, image_2 and so on together."""

REFUSED = ("video", "videos", "audio", "audios")
_LOOK_AT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of each role; None where there is none.

    Attributes:
        images: Columns of images; several if they are numbered.
        plain: Columns without images.
        refused: Columns with media that cannot be used, if a row has any.
        wants_answer: True if each row must have an answer or a demonstration.
        named: Roles whose columns the user named.
    """

    prompt: str
    images: tuple[str, ...]
    answer: str | None
    demonstration: str | None
    system: str | None
    choices: str | None
    source: str | None
    plain: tuple[str, ...]
    refused: tuple[str, ...]
    wants_answer: bool
    named: frozenset[str]

    @property
    def used(self) -> frozenset[str]:
        """The columns that rows are made of; others hold images that no role has."""
        roles = (self.prompt, self.answer, self.demonstration, self.system, self.choices, self.source)
        named = [*self.images, *(role for role in roles if role is not None)]
        return frozenset([*self.plain, *self.refused, *named, *(name.partition(".")[0] for name in named)])

    def described(self) -> dict[str, str]:
        """The column of each role, for people."""
        single = {role: getattr(self, role) for role in ALIASES if role != "images"}
        chosen = {"prompt": self.prompt, "images": ", ".join(self.images), **single}
        return {role: column for role, column in chosen.items() if column}


def choose_columns(rows: Rows, named: Mapping[str, str | None], where: str) -> Columns:
    """The columns of a table by role.

    Args:
        rows: The table.
        named: The user's choice for each role: a column, "" for none, or None for the first of ``ALIASES``.
        where: The dataset, for messages.

    Raises:
        DataError: A column that is needed or named is missing, or several fit.
    """
    return _Chooser(rows, named, where).choose()


def lookup(cells: Mapping[str, Any], column: str) -> Any:
    """The cell of a column, or of a field within a struct; None if there is none."""
    if column in cells:
        return cells[column]
    value: Any = cells
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class _Chooser:
    def __init__(self, rows: Rows, named: Mapping[str, str | None], where: str) -> None:
        self._rows = rows
        self._named = named
        self._where = where
        self._first: list[Mapping[str, Any]] | None = None
        # A column that is named for one role is a candidate for no other.
        self._taken = {column: role for role, column in named.items() if column}

    def choose(self) -> Columns:
        columns = self._rows.columns
        prompt = self._one("prompt")
        if prompt is None:
            self._missing("prompt", "None of the columns is known as a prompt")
        images = self._one("images")
        numbered = self._numbered(images) if images and images.endswith(NUMBERED) else ()
        pictures = {*numbered, *([images] if images else []), *self._rows.image_columns}
        if not images and self._named["images"] is None and self._rows.image_columns:
            found = ", ".join(self._rows.image_columns)
            self._missing("images", f"The images in {found} would not be used")
        demonstration = self._one("demonstration")
        answer = self._one("answer", aside=("solution",) if demonstration == "solution" else ())
        system, choices, source = (self._one(role) for role in ("system", "choices", "source"))
        unused = [self._numbered(name) if name.endswith(NUMBERED) else (name,) for name in self._present("images")]
        pictures.update(chain.from_iterable(unused))
        return Columns(
            prompt=prompt,
            images=numbered or ((images,) if images else ()),
            answer=answer,
            demonstration=demonstration,
            system=system,
            choices=choices,
            source=source,
            plain=tuple(name for name in columns if name not in pictures),
            refused=tuple(name for name in columns if name in REFUSED),
            wants_answer=self._wants_answer(prompt, answer, demonstration),
            named=frozenset(role for role, column in self._named.items() if column),
        )

    def _one(self, role: str, aside: Iterable[str] = ()) -> str | None:
        """The column of a role. Those ``aside`` count only if there is no other."""
        named = self._named[role]
        if named is not None:
            if named and not self._exists(named):
                self._missing(role, f"The dataset has no column {named!r} for its {role}")
            return named or None
        present = [name for name in self._present(role) if self._taken.get(name, role) == role]
        found = [name for name in present if name not in aside] or present
        if len(found) > 1:
            raise DataError(
                f"Several columns could be the {role}: {', '.join(found)}",
                where=self._where,
                possible=", ".join(self._rows.columns),
                remedy=f"name one, such as data.train.{role}: {found[0]} (data.eval.{role} for evaluation)",
            )
        return found[0] if found else None

    def _present(self, role: str) -> list[str]:
        return [name for name in ALIASES[role] if self._exists(name)]

    def _exists(self, column: str) -> bool:
        if column in self._rows.columns:
            return True
        if column.endswith(NUMBERED):
            return bool(self._numbered(column))
        parent, dot, _ = column.partition(".")
        return bool(dot) and parent in self._rows.columns and any(_has(cells, column) for cells in self._first_rows())

    def _numbered(self, column: str) -> tuple[str, ...]:
        pattern = re.compile(re.escape(column.removesuffix(f"1{NUMBERED}")) + r"([1-9]\d{0,3})")
        found = {int(match[1]): name for name in self._rows.columns if (match := pattern.fullmatch(name))}
        if len(found) != max(found, default=0):
            self._missing("images", f"The columns {', '.join(found.values())} are not numbered one after the other")
        return tuple(found[number] for number in sorted(found))

    def _first_rows(self) -> Sequence[Mapping[str, Any]]:
        """Some rows: text tables do not say which fields their structs have."""
        if self._first is None:
            self._first = []
            for index in range(min(len(self._rows), _LOOK_AT_ROWS)):
                try:
                    self._first.append(self._rows.read(index))
                except DataError:  # reported when the row is used
                    continue
        return self._first

    def _wants_answer(self, prompt: str, answer: str | None, demonstration: str | None) -> bool:
        if self._named["answer"] == "":
            return False
        # Conversations may end with the answer, which each row shows.
        if not (answer or demonstration or any(_is_conversation(lookup(c, prompt)) for c in self._first_rows())):
            self._missing("answer", "None of the columns is known as an answer")
        return True

    def _missing(self, role: str, what: str) -> NoReturn:
        example = next(iter(self._rows.image_columns if role == "images" else self._rows.columns), "COLUMN")
        none = "" if role == "prompt" else '; "" is none of them'
        raise DataError(
            what,
            where=self._where,
            possible=", ".join(self._rows.columns),
            remedy=f"name one of them, such as data.train.{role}: {example}{none}",
        )


def _has(cells: Mapping[str, Any], column: str) -> bool:
    *parents, last = column.split(".")
    inner = lookup(cells, ".".join(parents))
    return isinstance(inner, Mapping) and last in inner


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
