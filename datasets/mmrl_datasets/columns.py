"""Chooses the columns of a table for each role, by the names that datasets use."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NoReturn

from mmrl.errors import DataError
from mmrl_datasets.glances import Glance
from mmrl_datasets.lookalikes import letters_note, looks_like, notes
from mmrl_datasets.pictures import ADDRESSES, ENCODED, MEDIA, forms_in
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
_NONE = '""'


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of each role; None where there is none.

    Attributes:
        images: Columns of images; several if they are numbered.
        plain: Columns without images.
        refused: Columns with media that cannot be used, if a row has any.
        wants_answer: True if each row must have an answer or a demonstration.
        named: Roles whose columns the user named.
        notes: A sentence on each column that looks needed and has no role.
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
    notes: tuple[str, ...] = ()

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


def choose_columns(rows: Rows, named: Mapping[str, str | None], where: str, *, asks: bool = True) -> Columns:
    """The columns of a table by role.

    Args:
        rows: The table.
        named: The user's choice for each role: a column, "" for none, or None for the first of ``ALIASES``.
        where: The dataset, for messages.
        asks: False if the columns of the table are known, so that none has to be told of.

    Raises:
        DataError: A column that is needed or named is missing, several fit, or pictures would not be used.
    """
    return _Chooser(rows, named, where, asks).choose()


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


@dataclass(frozen=True, slots=True)
class _Media:
    """Pictures, or other media, in a column or a field; ``row`` is the first one that was seen with them."""

    form: str
    row: int | None
    is_rare: bool

    @property
    def place(self) -> str:
        return self.form if self.row is None else f"row {self.row}: {self.form}"


class _Chooser:
    def __init__(self, rows: Rows, named: Mapping[str, str | None], where: str, asks: bool) -> None:
        self._rows = rows
        self._named = named
        self._where = where
        self._asks = asks
        self._first: list[Mapping[str, Any]] | None = None
        # A column that is named for one role is a candidate for no other.
        self._taken = {column: role for role, column in named.items() if column}

    def choose(self) -> Columns:
        prompt = self._one("prompt")
        if prompt is None:
            self._missing("prompt", "None of the columns is known as a prompt")
        demonstration = self._one("demonstration")
        answer = self._one("answer", aside=("solution",) if demonstration == "solution" else ())
        system, choices, source = (self._one(role) for role in ("system", "choices", "source"))
        roles = {"prompt": prompt, "answer": answer, "demonstration": demonstration} | {
            "system": system, "choices": choices, "source": source
        }  # fmt: skip
        glance = self._rows.glance(self._open_columns(roles))
        media = self._media(glance, roles)
        images = self._images({name: found for name, found in media.items() if found.form != MEDIA})
        numbered = self._numbered(images) if images and images.endswith(NUMBERED) else ()
        encoded = (name for name, found in media.items() if found.form in ENCODED)
        pictures = {*self._known_images(), *numbered, *self._rows.image_columns, *encoded, images}
        return Columns(
            prompt=prompt,
            images=numbered or ((images,) if images else ()),
            answer=answer,
            demonstration=demonstration,
            system=system,
            choices=choices,
            source=source,
            plain=tuple(name for name in self._rows.columns if name not in pictures),
            refused=tuple(name for name in self._rows.columns if name in REFUSED),
            wants_answer=self._wants_answer(roles),
            named=frozenset(role for role, column in self._named.items() if column),
            notes=tuple(self._notes(roles, {*numbered, images}, glance, media)) if self._asks else (),
        )

    def _open_columns(self, roles: Mapping[str, str | None]) -> list[str]:
        """The columns that no role has by their names alone."""
        known = {*self._known_images(), *self._rows.image_columns, *REFUSED, *roles.values(), *self._taken}
        return [name for name in self._rows.columns if name not in known]

    def _known_images(self) -> set[str]:
        """The columns whose names are always those of images."""
        present = self._present("images")
        return {column for name in present for column in (self._numbered(name) if name.endswith(NUMBERED) else [name])}

    def _media(self, glance: Glance, roles: Mapping[str, str | None]) -> dict[str, _Media]:
        """The columns and fields with pictures or other media."""
        found = dict[str, _Media]()
        for column, cells in glance.items():
            seen = dict[str, list[tuple[int, str]]]()
            for row, value in cells:
                for name, form in forms_in(value, column):
                    seen.setdefault(name, []).append((row, form))
            for name, places in seen.items():
                row, form = places[0]
                found[name] = _Media(form, row, form not in ENCODED and 2 * len(places) < len(cells))
        declared = {name: _Media("images", None, False) for name in self._rows.image_columns}
        taken = {*roles.values(), *self._known_images()}
        return {name: media for name, media in (declared | found).items() if name not in taken}

    def _images(self, pictures: Mapping[str, _Media]) -> str | None:
        """The column of the images, or several as ``image_1..n``."""
        if self._named["images"] is not None:
            return self._one("images")
        held = [name for name, found in pictures.items() if not found.is_rare and self._is_free(name, "images")]
        known = [name for name in self._present("images") if self._is_free(name, "images")]
        for candidates in (
            [*known, *(name for name in PICTURES if name in held)],
            [n for n in REFERENCES if n in held],
        ):
            if candidates:
                return self._only("images", candidates)
        if held:
            shown = ", ".join(f"{name!r} ({pictures[name].place})" for name in held)
            raise DataError(
                f"Pictures would not be used: no column is known as the images, and there are some in {shown}",
                where=self._where,
                possible=", ".join(self._rows.columns),
                remedy=f'write data.train.images: {_together(held)}, or data.train.images: "" to use none of them '
                "(data.eval.images for evaluation)",
            )
        return None

    def _notes(
        self,
        roles: Mapping[str, str | None],
        images: Collection[str | None],
        glance: Glance,
        media: Mapping[str, _Media],
    ) -> Iterator[str]:
        """A sentence on each column that looks needed and has no role."""
        used = ", ".join(name for name in images if name)
        for name, found in media.items():
            if found.form == MEDIA:
                yield f"column {name!r} ({found.place}) holds videos or sounds, which are not read"
            elif used and found.form == ADDRESSES:  # where the images came from
                continue
            elif self._named["images"] is None and name not in images:
                instead = f"the images are those of {used!r}" if used else "is not read"
                yield (
                    f"column {name!r} ({found.place}) holds pictures too, and {instead}: write images: {name}, or "
                    f"images: {used or _NONE} to leave it so"
                )
        undecided = [role for role, column in self._named.items() if column is None]
        others = {name: cells for name, cells in glance.items() if name not in media and name not in images}
        yield from notes(others, roles, undecided)
        answer = roles["answer"]
        if answer is not None and roles["choices"] is None and "choices" in undecided:
            root = answer if answer in self._rows.columns else answer.partition(".")[0]
            yield from letters_note(
                [(r, lookup({root: c}, answer)) for r, c in self._rows.glance([root])[root]], answer
            )

    def _one(self, role: str, aside: Iterable[str] = ()) -> str | None:
        """The column of a role. Those ``aside`` count only if there is no other."""
        named = self._named[role]
        if named is not None:
            if named and not self._exists(named):
                self._missing(role, f"The dataset has no column {named!r} for its {role}")
            return named or None
        present = [name for name in self._present(role) if self._is_free(name, role)]
        found = [name for name in present if name not in aside] or present
        return self._only(role, found) if found else None

    def _is_free(self, name: str, role: str) -> bool:
        return self._taken.get(name, role) == role

    def _only(self, role: str, found: Sequence[str]) -> str:
        if len(found) > 1:
            raise DataError(
                f"Several columns could be the {role}: {', '.join(found)}",
                where=self._where,
                possible=", ".join(self._rows.columns),
                remedy=f"name one, such as data.train.{role}: {found[0]} (data.eval.{role} for evaluation)",
            )
        return found[0]

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

    def _wants_answer(self, roles: Mapping[str, str | None]) -> bool:
        if self._named["answer"] == "":
            return False
        prompt = roles["prompt"] or ""
        # Conversations may end with the answer, which each row shows.
        has_one = roles["answer"] or roles["demonstration"]
        if not (has_one or any(_is_conversation(lookup(cells, prompt)) for cells in self._first_rows())):
            self._missing("answer", "None of the columns is known as an answer", roles)
        return True

    def _missing(self, role: str, what: str, roles: Mapping[str, str | None] = MappingProxyType({})) -> NoReturn:
        columns = self._rows.columns
        names = {*chain.from_iterable(ALIASES.values()), *PICTURES, *REFERENCES, *REFUSED}
        free = [name for name in columns if name not in names and name not in {*roles.values(), *self._taken}]
        example = next(iter([*looks_like(role, columns), *free, *(columns if role != "answer" else ())]), None)
        write = "add such a column" if example is None else f"name one of them, such as data.train.{role}: {example}"
        nothing = "" if role == "prompt" else f'; or write data.train.{role}: "" if there is none'
        nothing += ", as where an environment or a reward scores without one" if role == "answer" else ""
        raise DataError(what, where=self._where, possible=", ".join(columns), remedy=f"{write}{nothing}")


def _together(names: Sequence[str]) -> str:
    """The first name, or all as ``figure_1..n`` if they are numbered."""
    stems = {name.rstrip("0123456789") for name in names}
    return f"{stems.pop()}1{NUMBERED}" if len(names) > 1 and len(stems) == 1 else names[0]


def _has(cells: Mapping[str, Any], column: str) -> bool:
    *parents, last = column.split(".")
    inner = lookup(cells, ".".join(parents))
    return any(isinstance(each, Mapping) and last in each for each in (inner if isinstance(inner, list) else [inner]))


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
