"""Thoughts that a chat template begins: a shown turn goes on where its head stops, as a sampled one does."""

from __future__ import annotations

import re

from mmrl.errors import DataError
from mmrl.types import THOUGHT_NAMES

_BEGUN = re.compile(rf"([<◁\[])((?:(?<=<)(?:{THOUGHT_NAMES})|(?<=◁)think|(?<=\[)THINK)[>▷\]])(\s*)(\1/\2\s*)?\Z")
"""The opening of a thought, ``◁think▷`` and ``[THINK]`` too, at a text's end, and perhaps its closing."""
_SWITCH = "data.template_options: {enable_thinking: false}"


def begun(head: str) -> str:
    """The tag of a thought that a prompt ends with, such as ``<think>``; empty if there is none."""
    found = _BEGUN.search(head)
    return found[1] + found[2] if found else ""


def closing(head: str) -> str:
    """The tag that must come before an answer after a prompt, such as ``</think>``; empty where no thought is open."""
    found = _BEGUN.search(head)
    return f"{found[1]}/{found[2]}" if found and not found[4] else ""


def continued(text: str, head: str, where: str) -> str:
    """A shown turn from where its prompt stops: the opening of a thought that the prompt has written is left out.

    Args:
        head: The text before the turn.
        where: The row, for errors.

    Raises:
        DataError: The turn never leaves the thought that the prompt has begun, or thinks although the prompt has ended
            the thought.
    """
    if (found := _BEGUN.search(head)) is None:
        return text
    mark, name, space, ended = found.groups()
    opening, closing = mark + name, f"{mark}/{name}"
    opened = re.match(rf"\s*{re.escape(opening)}", text)
    rest = text[opened.end() :] if opened else text
    if ended:
        return _without_thought(text, rest, opening, closing, where)
    if opened:
        rest = rest.removeprefix(space) if rest.startswith(space) else rest.lstrip()
    if closing not in rest:
        raise DataError(
            f"the chat template opens {opening} before the demonstration, which has no {closing}: the policy would "
            "learn to answer within a thought that never ends",
            where=where,
            possible=f"a thought, {closing} and the answer; or {closing} and the answer alone",
            remedy=f"mend or remove the row, or have the template open no thought, such as by {_SWITCH}",
        )
    return rest


def _without_thought(text: str, rest: str, opening: str, closing: str, where: str) -> str:
    """A turn without an empty thought, which the prompt has written already."""
    thought, closed, answer = rest.partition(closing)
    if not closed:
        return text
    if thought.strip():
        raise DataError(
            f"the demonstration has a thought, and the chat template writes {opening}{closing} before it, without one",
            where=where,
            possible="an answer without a thought",
            remedy="remove the thoughts, or have the template let the policy think, by data.template_options",
        )
    return answer.lstrip()
