"""The answer that a completion gives, as text in which equal answers are equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

_BOX = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?(?:/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DIGITS = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?(?:/\d{1,40})?")
_LONGEST = 32_768
"""Characters at the end of a completion that are searched."""


def answer_in(text: str, pattern: re.Pattern[str] | None = None, *, marked: bool = False) -> str | None:
    r"""The answer of a completion in one spelling; None if it has none.

    That is the last ``\boxed{...}``, else the last ``<answer>...</answer>``, else the last number.

    Args:
        pattern: Takes the place of all three: its last match counts, and of that the first group if it has one.
        marked: True if a number without a box or tags is no answer.
    """
    text = text[-_LONGEST:]
    if pattern is not None:
        found = [match[1] if pattern.groups else match[0] for match in pattern.finditer(text)]
    else:
        found = [*_boxed(text)][-1:] or _TAG.findall(text)
        found = found or ([] if marked else _NUMBER.findall(text))
    return one_spelling(found[-1]) or None if found and found[-1] is not None else None


def references(answer: Any) -> list[str]:
    """The right answers in one spelling: a list means any of its items, a mapping what is under ``answer``."""
    if isinstance(answer, Mapping):
        answer = answer.get("answer")
    items = answer if isinstance(answer, list | tuple) else [answer]
    return [spelled for item in items if item is not None and (spelled := one_spelling(str(item)))]


def one_spelling(answer: str) -> str:
    """The answer without ``$`` around it, in lower case and with single spaces; a number as a reduced fraction."""
    bare = " ".join(answer.split()).strip("$ ").rstrip(".,").strip("$ ").casefold()
    digits = _THOUSANDS.sub("", bare)
    if not _DIGITS.fullmatch(digits):
        return bare
    numerator, _, denominator = digits.partition("/")
    if denominator and int(denominator) == 0:
        return bare
    return str(Fraction(numerator) / int(denominator or 1))


def _boxed(text: str) -> Iterator[str]:
    """The content of each closed box, in the order of their ends; linear in the text."""
    opened = list[int | None]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] == _BOX else None)
        elif opened and (begin := opened.pop()) is not None:
            yield text[begin : brace.start()]
