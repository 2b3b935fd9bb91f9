"""The answers that a question offers: read from a cell, and listed after the question."""

from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Sequence
from typing import Any

from mmrl.errors import DataError

MAX_CHOICES = len(string.ascii_uppercase)
MAX_TEXT = 65_536
"""Characters of a list that is written as text."""


def read_choices(value: Any, where: str) -> tuple[str, ...]:
    """The choices of a cell: a list, or one that is written as text (``"['3', '4']"``); null and empty are none.

    Raises:
        DataError: The cell is no list of at most 26 texts or numbers.
    """
    if isinstance(value, str):
        value = _literal(value, where)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(_is_choice(each) for each in value):
        raise DataError("The choices are no list of texts or numbers", where=where, possible="['3', '4', 'none']")
    if len(value) > MAX_CHOICES:
        raise DataError(f"There are {len(value)} choices", where=where, possible=f"up to {MAX_CHOICES}, A to Z")
    return tuple(str(each) for each in value)


def with_choices(text: str, choices: Sequence[str]) -> str:
    """The question with its choices as "(A) ...", one a line, unless they are listed in it already."""
    labelled = list(zip(string.ascii_uppercase, choices, strict=False))
    if not choices or all(_is_listed(text, letter, choice) for letter, choice in labelled):
        return text
    return "\n".join([text, *(f"({letter}) {choice}" for letter, choice in labelled)])


def _literal(text: str, where: str) -> Any:
    """A list written as Python or JSON, read without evaluating anything."""
    if not text.strip():
        return None
    if len(text) > MAX_TEXT:
        raise DataError(f"The choices have {len(text)} characters", where=where, possible=f"up to {MAX_TEXT}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LaTeX has backslashes that Python does not know
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise DataError("The choices are no list", where=where, possible="\"['3', '4']\"") from error


def _is_choice(value: Any) -> bool:
    is_short = not isinstance(value, int) or abs(value) < 10**100  # Python refuses to write huge numbers
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and is_short


def _is_listed(text: str, letter: str, choice: str) -> bool:
    return re.search(rf"(?<!\w)\(?{letter}[).:]\s*{re.escape(choice.strip())}", text) is not None
