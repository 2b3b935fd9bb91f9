"""The columns of answers to compare: chosen and rejected ones, answers with scores, or one with a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import DataError
from mmrl_datasets.lookalikes import is_conversation
from mmrl_datasets.names import ALIASES, Names

_PAIR, _SCORED, _JUDGED = ("chosen", "rejected", "margin"), ("candidates", "scores"), ("desirable",)
COMPARED = (*_PAIR, *_SCORED, *_JUDGED)
"""The roles of such columns."""
COMPLETION = "completion"
"""The column of the answer that ``desirable`` judges, if the user named no demonstration."""
OWN_IMAGES = ("rejected_images", "rejected_image", "chosen_images", "chosen_image")
"""Names of images that one of several answers has for itself."""


@dataclass(frozen=True, slots=True)
class ComparedColumns:
    """The columns of answers to compare, of one way to give them.

    Attributes:
        roles: The column of each role that has one. A conversation that ends with the chosen answer is ``chosen``.
        answer: The column of the answer that ``desirable`` judges; the prompt's, if the answer ends a conversation.
        conversation: The column of conversations that end with an answer, of a table without a prompt.
        own_images: Columns of images of one answer, which cannot be used, if a row has any.
    """

    roles: Mapping[str, str]
    answer: str | None = None
    conversation: str | None = None
    own_images: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """The columns in which answers stand."""
        held = (*(self.roles.get(role) for role in ("chosen", "rejected", "candidates")), self.answer)
        return tuple(column for column in held if column is not None)

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that are read or must be empty."""
        return (*self.roles.values(), *self.answers, *self.own_images)


def choose_compared(names: Names, prompt: str | None) -> ComparedColumns | None:
    """The columns of answers to compare; None if the table has no such answers.

    Args:
        names: Finds columns by name.
        prompt: The column of the prompt, if there is one.

    Raises:
        DataError: A column is missing, or answers are given in several ways.
    """
    named = [roles for roles in (_PAIR, _SCORED, _JUDGED) if any(names.named[role] for role in roles)]
    ways = named or [roles for roles in (_PAIR, _SCORED) if _is_there(names, roles)]
    if not ways and names.named["desirable"] is None and _is_judged(names, prompt):
        ways = [_JUDGED]
    if not ways:
        return None
    if len(ways) > 1:
        told = ", or ".join(" and ".join(roles) for roles in ways)
        raise DataError(
            f"The table gives answers to compare in several ways: {told}",
            where=names.where,
            possible=", ".join(names.rows.columns),
            remedy=f'leave one out, such as data.train.{ways[-1][0]}: "" (data.eval.{ways[-1][0]} for evaluation)',
        )
    [way] = ways
    roles = {role: column for role in way if (column := names.one(role))}
    own = tuple(name for name in OWN_IMAGES if name in names.rows.columns)
    if way == _JUDGED:
        answer = names.named["demonstration"] or (COMPLETION if COMPLETION in names.rows.columns else prompt)
        return ComparedColumns(roles, answer=answer, own_images=own)
    if "chosen" not in roles and "rejected" in roles and prompt and _holds_conversations(names, prompt):
        roles["chosen"] = prompt
    for role in way[:2]:
        if role not in roles:
            there = ", ".join(f"{name} ({column!r})" for name, column in roles.items())
            unless = f'write data.train.{next(iter(roles))}: "" if no answers are compared'
            names.missing(role, f"The table has {there}, and no column is known as {role}", roles, unless)
    first = roles[way[0]]
    return ComparedColumns(roles, conversation=first if _holds_conversations(names, first) else None, own_images=own)


def _is_there(names: Names, way: Sequence[str]) -> bool:
    """True if the names of columns, and what stands in them, are those of answers to compare."""
    if any(names.named[role] == "" for role in way[:2]):
        return False
    if way == _SCORED:
        return all(_answer_columns(names, role) for role in way)
    is_taken = any(not names.is_free(name, "chosen") for name in names.present("chosen"))
    if is_taken and names.named["prompt"] not in ALIASES["chosen"]:  # such as a demonstration: nothing is compared
        return False
    return bool(_answer_columns(names, "rejected"))


def _is_judged(names: Names, prompt: str | None) -> bool:
    """True if one answer is there, in a column or at the end of the conversation, and a verdict of true or false."""
    [label] = ALIASES["desirable"]
    if label not in names.rows.columns or not names.is_free(label, "desirable"):
        return False
    if not names.holds_verdicts(label):
        return False
    if COMPLETION in names.rows.columns:
        return names.is_free(COMPLETION, "desirable")
    talks = [talk for talk in names.cells(prompt) if is_conversation(talk)] if prompt else []
    last: Mapping[str, Any] = talks[0][-1] if talks else {}
    return last.get("role", last.get("from")) in ("assistant", "gpt")


def _answer_columns(names: Names, role: str) -> list[str]:
    """The columns with a name of the role that hold texts, messages or lists, or nothing that is looked at."""
    free = [name for name in names.present(role) if names.is_free(name, role)]
    cells = {name: names.cells(name) for name in free}
    return [name for name in free if not cells[name] or any(isinstance(c, str | list | Mapping) for c in cells[name])]


def _holds_conversations(names: Names, column: str) -> bool:
    return any(map(_is_talk, names.cells(column)))


def _is_talk(cell: Any) -> bool:
    """True for messages, also as JSON text, and for lists of such."""
    if isinstance(cell, str):
        return cell.lstrip().startswith("[{")
    return is_conversation(cell) or (isinstance(cell, list) and bool(cell) and is_conversation(cell[0]))
