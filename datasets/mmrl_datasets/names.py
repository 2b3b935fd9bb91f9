"""Finds columns by the names that datasets use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NoReturn

from mmrl.errors import DataError
from mmrl_datasets.lookalikes import looks_like
from mmrl_datasets.rows import Rows

NUMBERED = "..n"
ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("problem", "question", "query", "prompt", "instruction", "input", "messages", "conversations"),
    "document": (),
    "images": ("images", "image", "decoded_image", f"image_1{NUMBERED}", "image_path", "image_paths"),
    "answer": (
        "answer", "solution", "ground_truth", "gt_answer", "reward_model.ground_truth", "label", "answers", "target"
    ),
    "demonstration": ("solution",),
    "system": ("system", "system_prompt"),
    "choices": ("choices", "options"),
    "source": ("data_source",),
    "category": (),
    "chosen": ("chosen",),
    "rejected": ("rejected", "rejected_response", "rejected_messages"),
    "margin": ("margin",),
    "candidates": ("candidates",),
    "scores": ("scores",),
    "desirable": ("label",),
}  # fmt: skip
"""Column names by role; dots lead into structs, and ``image_1..n`` is image_1, image_2 and so on together."""
PICTURES = (
    "img", "imgs", "pic", "pics", "picture", "pictures", "photo", "photos", "screenshot", "screenshots", "png", "jpg",
    "jpeg",
)  # fmt: skip
"""Further names of images, where these columns hold pictures."""
REFERENCES = (
    "image_file", "image_files", "image_filename", "image_filenames", "image_name", "image_url", "image_urls",
    "image_bytes", "image_base64", "img_file", "img_path", "img_paths", "img_url", "img_urls", "file_name",
)  # fmt: skip
"""Names of images where these columns hold pictures and none of the other names does: they often tell where an image
came from."""

REFUSED = ("video", "videos", "audio", "audios")
_LOOK_AT_ROWS = 8
_NO_GUESS = ("answer", "chosen", "rejected", "candidates", "scores")
"""Roles for which a column that is known as something else is not proposed."""


def lookup(cells: Mapping[str, Any], column: str) -> Any:
    """The cell of a column, or of a field within a struct, or within each struct of a list; None if there is none."""
    if column in cells:
        return cells[column]
    value: Any = cells
    for name in column.split("."):
        value = _field(value, name)
    return value


def _field(value: Any, name: str) -> Any:
    if isinstance(value, list) and any(isinstance(each, Mapping) and name in each for each in value):
        return [_field(each, name) for each in value]
    return value.get(name) if isinstance(value, Mapping) else None


class Names:
    """The columns of a table, by the user's choice of roles and by name.

    Args:
        rows: The table.
        named: The user's choice for each role: a column, "" for none, or None for the first of ``ALIASES``.
        where: The dataset, for messages.
        added: Columns that are put into each row after it was read.
    """

    def __init__(self, rows: Rows, named: Mapping[str, str | None], where: str, added: Sequence[str] = ()) -> None:
        self.rows, self.named, self.where = rows, named, where
        self._added = frozenset(added)
        self._first: list[Mapping[str, Any]] | None = None
        # A column that is named for one role is a candidate for no other; a category may be an answer or a source too.
        self.taken = {column: role for role, column in named.items() if column and role != "category"}

    def one(self, role: str, aside: Iterable[str] = ()) -> str | None:
        """The column of a role. Those ``aside`` count only if there is no other."""
        named = self.named[role]
        if named is not None:
            if named and not self.exists(named):
                self.missing(role, f"The dataset has no column {named!r} for its {role}")
            return named or None
        present = [name for name in self.present(role) if self.is_free(name, role)]
        found = [name for name in present if name not in aside] or present
        return self.only(role, found) if found else None

    def is_free(self, name: str, role: str) -> bool:
        """True if the user named the column for no other role."""
        return self.taken.get(name, role) == role

    def only(self, role: str, found: Sequence[str]) -> str:
        """The one that was found.

        Raises:
            DataError: There are several.
        """
        if len(found) > 1:
            raise DataError(
                f"Several columns could be the {role}: {', '.join(found)}",
                where=self.where,
                possible=", ".join(self.rows.columns),
                remedy=f"name one, such as data.train.{role}: {found[0]} (data.eval.{role} for evaluation)"
                + self._verdict(found),
            )
        return found[0]

    def _verdict(self, found: Sequence[str]) -> str:
        """A remedy for columns of which one says whether the answer in another is good."""
        verdicts = [name for name in found if name in ALIASES["desirable"] and self.holds_verdicts(name)]
        if not verdicts:
            return ""
        answer = next((name for name in found if name not in verdicts), "COLUMN")
        named = f"data.train.desirable: {verdicts[0]} and data.train.demonstration: {answer}"
        return f"; or, if {verdicts[0]} says of each answer whether it is good, {named}"

    def holds_verdicts(self, column: str) -> bool:
        """True if some cells of a column hold something, and all of these true or false."""
        cells = self.cells(column)
        return bool(cells) and all(isinstance(each, bool) for each in cells)

    def present(self, role: str) -> list[str]:
        """The columns that have one of the role's names."""
        return [name for name in ALIASES[role] if self.exists(name)]

    def exists(self, column: str) -> bool:
        """True if there is such a column, field of a struct, or row of numbered columns."""
        if column in self.rows.columns or column in self._added:
            return True
        if column.endswith(NUMBERED):
            return bool(self.numbered(column))
        parent, dot, _ = column.partition(".")
        return bool(dot) and parent in self.rows.columns and any(_has(cells, column) for cells in self.first_rows())

    def numbered(self, column: str) -> tuple[str, ...]:
        """The columns that ``image_1..n`` and the like stand for.

        Raises:
            DataError: Their numbers have gaps.
        """
        pattern = re.compile(re.escape(column.removesuffix(f"1{NUMBERED}")) + r"([1-9]\d{0,3})")
        found = {int(match[1]): name for name in self.rows.columns if (match := pattern.fullmatch(name))}
        if len(found) != max(found, default=0):
            raise DataError(
                f"The columns {', '.join(found.values())} are not numbered one after the other",
                where=self.where,
                possible=", ".join(self.rows.columns),
                remedy=f"number them from 1 without a gap, or name one of them, such as {next(iter(found.values()))}",
            )
        return tuple(found[number] for number in sorted(found))

    def cells(self, column: str) -> list[Any]:
        """Some cells of a column, or of a field, that hold something; none of one that is added later."""
        if column in self._added:
            return []
        root = column if column in self.rows.columns else column.partition(".")[0]
        return [lookup({root: cell}, column) for _, cell in self.rows.glance([root])[root]]

    def first_rows(self) -> Sequence[Mapping[str, Any]]:
        """Some rows: text tables do not say which fields their structs have."""
        if self._first is None:
            self._first = []
            for index in range(min(len(self.rows), _LOOK_AT_ROWS)):
                try:
                    self._first.append(self.rows.read(index))
                except DataError:  # reported when the row is used
                    continue
        return self._first

    def missing(
        self, role: str, what: str, roles: Mapping[str, str | None] = MappingProxyType({}), unless: str | None = None
    ) -> NoReturn:
        """Raise for a role without a column.

        Args:
            what: The problem.
            roles: The column of other roles, which is not proposed.
            unless: Another way out; None for that of doing without the role.

        Raises:
            DataError: Always.
        """
        columns = self.rows.columns
        names = {*chain.from_iterable(ALIASES.values()), *PICTURES, *REFERENCES, *REFUSED}
        free = [name for name in columns if name not in names and name not in {*roles.values(), *self.taken}]
        likely = [name for name in self.present(role) if self.is_free(name, role)] + looks_like(role, columns)
        any_other = () if role in _NO_GUESS else columns
        example = next(iter([*likely, *free, *any_other]), None)
        add = "add such a column" + (f", or name one with data.train.{role}" if role in _NO_GUESS[1:] else "")
        write = add if example is None else f"name one of them, such as data.train.{role}: {example}"
        if unless is None and role != "prompt":
            unless = f'write data.train.{role}: "" if there is none'
            unless += ", as where an environment or a reward scores without one" if role == "answer" else ""
        remedy = f"{write}; or {unless}" if unless else write
        raise DataError(what, where=self.where, possible=", ".join(columns), remedy=remedy)


def _has(cells: Mapping[str, Any], column: str) -> bool:
    *parents, last = column.split(".")
    inner = lookup(cells, ".".join(parents))
    return any(isinstance(each, Mapping) and last in each for each in (inner if isinstance(inner, list) else [inner]))
