"""Chooses the columns of a table for each role, by the names that datasets use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import DataError
from mmrl_datasets.compared import COMPARED, ComparedColumns, choose_compared
from mmrl_datasets.glances import Glance
from mmrl_datasets.lookalikes import letters_note, notes
from mmrl_datasets.names import ALIASES, NUMBERED, PICTURES, REFERENCES, REFUSED, Names, lookup
from mmrl_datasets.pictures import ADDRESSES, ENCODED, MEDIA, forms_in
from mmrl_datasets.rows import Rows

_NONE = '""'
_OF_QUESTIONS = ("prompt", "answer", "demonstration", "system", "choices")
"""Roles that documents have not, beside those of answers to compare."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of each role; None where there is none.

    Attributes:
        prompt: That of the documents, if ``document`` is one.
        images: Columns of images; several if they are numbered.
        plain: Columns without images.
        refused: Columns with media that cannot be used, if a row has any.
        wants_answer: True if each row must have an answer or a demonstration.
        named: Roles whose columns the user named.
        notes: A sentence on each column that looks needed and has no role.
        compared: The columns of answers to compare, if the table has such.
    """

    prompt: str
    images: tuple[str, ...]
    answer: str | None
    demonstration: str | None
    system: str | None
    choices: str | None
    source: str | None
    category: str | None
    plain: tuple[str, ...]
    refused: tuple[str, ...]
    wants_answer: bool
    named: frozenset[str]
    notes: tuple[str, ...] = ()
    compared: ComparedColumns | None = None
    document: str | None = None

    @property
    def used(self) -> frozenset[str]:
        """The columns that rows are made of; others hold images that no role has."""
        roles = (self.prompt, self.answer, self.demonstration, self.system, self.choices, self.source, self.category)
        compared = self.compared.used if self.compared else ()
        named = [*self.images, *compared, *(role for role in roles if role is not None)]
        return frozenset([*self.plain, *self.refused, *named, *(name.partition(".")[0] for name in named)])

    def described(self) -> dict[str, str]:
        """The column of each role, for people."""
        images = {"images": ", ".join(self.images)}
        found = {role: images.get(role, getattr(self, role, None)) for role in ALIASES if role not in COMPARED}
        found |= self.compared.roles if self.compared else {}
        found |= {"prompt": None} if self.document else {}
        return {role: column for role, column in found.items() if column}


def choose_columns(
    rows: Rows, named: Mapping[str, str | None], where: str, *, asks: bool = True, added: Sequence[str] = ()
) -> Columns:
    """The columns of a table by role.

    Args:
        rows: The table.
        named: The user's choice for each role: a column, "" for none, or None for the first of ``ALIASES``.
        where: The dataset, for messages.
        asks: False if the columns of the table are known, so that none has to be told of.
        added: Columns that are put into each row after it was read.

    Raises:
        DataError: A column that is needed or named is missing, several fit, or pictures would not be used.
    """
    return _Chooser(Names(rows, named, where, added), asks).choose()


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
    def __init__(self, names: Names, asks: bool) -> None:
        self._names = names
        self._asks = asks
        self._aside = frozenset[str]()

    def choose(self) -> Columns:
        document = self._names.one("document")
        if document is not None:
            self._refuse_beside_documents()
        prompt = document or self._names.one("prompt")
        compared = None if document else choose_compared(self._names, prompt)
        if prompt is None and compared is not None:
            prompt = compared.conversation
        if prompt is None:
            unless = "for texts that are learned as a whole, data.train.document: COLUMN"
            self._names.missing("prompt", "None of the columns is known as a prompt", unless=unless)
        self._aside = frozenset(compared.used if compared else ())
        demonstration = None if document else self._names.one("demonstration")
        aside = ("solution",) if demonstration == "solution" else ()
        answer = None if document else self._names.one("answer", aside=aside)
        others: dict[str, str | None] = dict.fromkeys(("system", "choices", "source", "category"))
        others |= {role: self._names.one(role) for role in others if not (document and role in _OF_QUESTIONS)}
        roles = {"prompt": prompt, "answer": answer, "demonstration": demonstration} | others
        glance = self._names.rows.glance(self._open_columns(roles))
        media = self._media(glance, roles)
        images = self._images({name: found for name, found in media.items() if found.form != MEDIA})
        numbered = self._names.numbered(images) if images and images.endswith(NUMBERED) else ()
        encoded = (name for name, found in media.items() if found.form in ENCODED)
        pictures = {*self._known_images(), *numbered, *self._names.rows.image_columns, *encoded, images}
        pictures |= set(compared.own_images) if compared else set()
        return Columns(
            prompt=prompt,
            images=numbered or ((images,) if images else ()),
            answer=answer,
            demonstration=demonstration,
            **others,
            plain=tuple(name for name in self._names.rows.columns if name not in pictures),
            refused=tuple(name for name in self._names.rows.columns if name in REFUSED),
            wants_answer=compared is None and document is None and self._wants_answer(roles),
            named=frozenset(role for role, column in self._names.named.items() if column),
            notes=tuple(self._notes(roles, {*numbered, images}, glance, media)) if self._asks else (),
            compared=compared,
            document=document,
        )

    def _refuse_beside_documents(self) -> None:
        """Raise if the user named a column that rows with a question alone have."""
        named = [role for role in (*_OF_QUESTIONS, *COMPARED) if self._names.named[role]]
        if named:
            raise DataError(
                f"A document is learned as a whole, and {' and '.join(named)} would have no place",
                where=self._names.where,
                possible="document, images, source, category",
                remedy=f"leave out document, or {', '.join(named)}",
            )

    def _open_columns(self, roles: Mapping[str, str | None]) -> list[str]:
        """The columns that no role has by their names alone."""
        known = {
            *self._known_images(),
            *self._names.rows.image_columns,
            *REFUSED,
            *roles.values(),
            *self._names.taken,
            *self._aside,
        }
        return [name for name in self._names.rows.columns if name not in known]

    def _known_images(self) -> set[str]:
        """The columns whose names are always those of images."""
        present = self._names.present("images")
        return {
            column for name in present for column in (self._names.numbered(name) if name.endswith(NUMBERED) else [name])
        }

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
        declared = {name: _Media("images", None, False) for name in self._names.rows.image_columns}
        taken = {*roles.values(), *self._known_images(), *self._aside}
        return {name: media for name, media in (declared | found).items() if name not in taken}

    def _images(self, pictures: Mapping[str, _Media]) -> str | None:
        """The column of the images, or several as ``image_1..n``."""
        if self._names.named["images"] is not None:
            return self._names.one("images")
        held = [name for name, found in pictures.items() if not found.is_rare and self._names.is_free(name, "images")]
        known = [name for name in self._names.present("images") if self._names.is_free(name, "images")]
        for candidates in (
            [*known, *(name for name in PICTURES if name in held)],
            [n for n in REFERENCES if n in held],
        ):
            if candidates:
                return self._names.only("images", candidates)
        if held:
            shown = ", ".join(f"{name!r} ({pictures[name].place})" for name in held)
            raise DataError(
                f"Pictures would not be used: no column is known as the images, and there are some in {shown}",
                where=self._names.where,
                possible=", ".join(self._names.rows.columns),
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
            elif self._names.named["images"] is None and name not in images:
                instead = f"the images are those of {used!r}" if used else "is not read"
                yield (
                    f"column {name!r} ({found.place}) holds pictures too, and {instead}: write images: {name}, or "
                    f"images: {used or _NONE} to leave it so"
                )
        undecided = [role for role, column in self._names.named.items() if column is None]
        if self._names.named["document"]:
            undecided = []
        elif self._aside:  # answers to compare are what is to be learned
            undecided = [role for role in undecided if role not in ("answer", "demonstration")]
        others = {name: cells for name, cells in glance.items() if name not in media and name not in images}
        yield from notes(others, roles, undecided)
        answer = roles["answer"]
        if answer is not None and roles["choices"] is None and "choices" in undecided:
            root = answer if answer in self._names.rows.columns else answer.partition(".")[0]
            yield from letters_note(
                [(r, lookup({root: c}, answer)) for r, c in self._names.rows.glance([root])[root]], answer
            )

    def _wants_answer(self, roles: Mapping[str, str | None]) -> bool:
        if self._names.named["answer"] == "":
            return False
        prompt = roles["prompt"] or ""
        # Conversations may end with the answer, which each row shows.
        has_one = roles["answer"] or roles["demonstration"]
        if not (has_one or any(_is_conversation(lookup(cells, prompt)) for cells in self._names.first_rows())):
            if chosen := self._names.present("chosen"):
                what = f"The table has chosen ({chosen[0]!r}), and no column is known as rejected or as an answer"
                unless = "name the answer that rewards read: data.train.answer"
                self._names.missing("rejected", what, {**roles, "chosen": chosen[0]}, unless)
            self._names.missing("answer", "None of the columns is known as an answer", roles)
        return True


def _together(names: Sequence[str]) -> str:
    """The first name, or all as ``figure_1..n`` if they are numbered."""
    stems = {name.rstrip("0123456789") for name in names}
    return f"{stems.pop()}1{NUMBERED}" if len(names) > 1 and len(stems) == 1 else names[0]


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
