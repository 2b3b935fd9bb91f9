"""Columns that look as if a role should have them, and that none has: each is named once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl_datasets.glances import Glance

NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": (
        "context", "passage", "hint", "text", "user", "userprompt", "questiontext", "prompttext", "history", "document",
        "question", "problem", "query", "instruction", "input",
    ),
    "answer": (
        "answer", "gold", "goldanswer", "reference", "referenceanswer", "refanswer", "gt", "groundtruth", "correct",
        "correctanswer", "finalanswer", "expected", "expectedanswer", "expectedoutput", "answerkey", "trueanswer",
        "answertext", "bestanswer", "gtanswer", "solution", "target", "targets", "label", "labels", "references",
        "correctoption", "correctchoice", "answerindex", "answeridx",
    ),
    "demonstration": (
        "response", "completion", "output", "assistant", "reasoningcontent", "reasoning", "thinking", "thought",
        "thoughts", "cot", "chainofthought",
    ),
    "system": ("system", "systemprompt", "systemmessage", "systeminstruction", "sysprompt", "instructions"),
    "choices": (
        "choice", "choices", "option", "options", "answerchoices", "answeroptions", "candidates", "alternatives",
        "multiplechoice", "mcoptions", "multiplechoiceoptions",
    ),
}  # fmt: skip
"""Names without case and marks, by the role that they look like; those of other roles are known and not here."""
_LOOKS_LIKE = {
    "prompt": "a part of the question",
    "answer": "the answer",
    "demonstration": "completions to imitate",
    "system": "the system prompt",
    "choices": "the choices",
}
_LETTERS = re.compile(r"(?:choice|option|answer)?([A-Ea-e]|[1-5])")
_LETTER = re.compile(r"\s*[(\[]?([A-Ja-j])[)\].:]?\s*")


def plain_name(name: str) -> str:
    """The name without case and marks: ``Final_Answer`` is ``finalanswer``."""
    return re.sub(r"[\W_]+", "", name).lower()


def looks_like(role: str, columns: Sequence[str]) -> list[str]:
    """The columns whose names look like a role."""
    return [name for name in columns if plain_name(name) in NAMES.get(role, ())]


def notes(glance: Glance, roles: Mapping[str, str | None], open_roles: Sequence[str]) -> Iterator[str]:
    """A sentence on each column that no role has and that looks as if one should.

    Args:
        glance: Cells of the columns without a role.
        roles: The column of each role; None or "" where there is none.
        open_roles: The roles that nobody has decided upon by an option.
    """
    filled = [name for name, cells in glance.items() if cells]
    told = set[str]()
    for role in (role for role in _LOOKS_LIKE if role in open_roles):
        for name in looks_like(role, filled):
            told.add(name)
            used = f"{roles[role]!r} is used" if roles.get(role) else "is not read"
            yield f"{_place(name, glance)} looks like {_LOOKS_LIKE[role]}, and {used}: {_advice(role, name, roles)}"
    if "choices" in open_roles and not roles.get("choices") and len(letters := _lettered(filled)) > 2:
        told |= set(letters)
        yield (
            f"columns {', '.join(letters)} look like the choices, and are not read: write them as lists into one "
            "column, named by the option choices"
        )
    for name in (name for name in filled if name not in told):
        if is_conversation(glance[name][0][1]):
            what = f"holds a conversation, and {roles['prompt']!r} is the prompt"
            yield f"{_place(name, glance)} {what}: write prompt: {name} to read it"
        elif plain_name(name) in ("tools", "functions"):
            yield f"{_place(name, glance)} lists tools, and is not read: tools are an environment's"


def letters_note(answers: Sequence[tuple[int, Any]], column: str) -> Iterator[str]:
    """A sentence on answers that are letters, where no column has the choices."""
    if len(answers) > 1 and all(isinstance(cell, str) and _LETTER.fullmatch(cell) for _, cell in answers):
        row, cell = answers[0]
        yield (
            f"column {column!r} holds letters (row {row}: {cell!r}), and no column holds the choices that they stand "
            "for, so that no answer in words is right: name it (choices: COLUMN), or say that there is none (choices: "
            '""); the reward `choice` reads letters and choices'
        )


def _place(name: str, glance: Glance) -> str:
    return f"column {name!r} (row {glance[name][0][0]})"


def _advice(role: str, name: str, roles: Mapping[str, str | None]) -> str:
    if role == "prompt":
        return f"only rewards and templates see it; `prompt_template` can put it there as {{{{ row.{name} }}}}"
    kept = roles.get(role) or '""'
    return f"write {role}: {name}, or {role}: {kept} to leave it so"


def _lettered(names: Sequence[str]) -> list[str]:
    """The columns A, B, C ... or option_1, option_2 ..., if the first of them is there."""
    found = {match[1].lower(): name for name in names if (match := _LETTERS.fullmatch(plain_name(name)))}
    first = next((letter for letter in "a1" if letter in found), None)
    same = [letter for letter in sorted(found) if first is not None and letter.isdigit() == first.isdigit()]
    return [found[letter] for letter in same]


def is_conversation(value: Any) -> bool:
    """True for a list of messages."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and bool({"role", "from"} & first.keys() and {"content", "value"} & first.keys())
