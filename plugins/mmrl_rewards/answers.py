"""Where the answer of a completion is, and what a dataset's gold answer says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)-?(?:\d+(?:,\d{3})*(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?%?")
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")]
_COMMAND = re.compile(r"\\(?:boxed|fbox|text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    """What is in the last complete ``\\boxed{...}`` or ``\\fbox{...}``, nested braces included; linear in the text."""
    last, opened = None, list[int | None]()
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened and (start := opened.pop()) is not None:
            last = max(last or (0, 0), (start, match.start()))
    return text[slice(*last)].strip() if last else None


def last_tagged(text: str) -> str | None:
    """What is in the last complete ``<answer>...</answer>``."""
    before, closed, _ = text.rpartition(_TAG_CLOSE)
    _, opened, answer = before.rpartition(_TAG_OPEN)
    return answer.strip() if closed and opened else None


def final_answer(text: str) -> str | None:
    """The answer that the text marks as such: in answer tags, in a box, or in a box within the tags."""
    tagged = last_tagged(text)
    boxed = last_boxed(text if tagged is None else tagged)
    return tagged if boxed is None else boxed


def last_number(text: str) -> str | None:
    """The last number: ``-3``, ``1,000``, ``0.5``, ``3/4``, ``50%``."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def bare(answer: str) -> str:
    """The answer without ``$``, ``\\(``, ``\\text{}`` and the like around it, nor a full stop; single spaces."""
    answer = " ".join(answer.split()).removesuffix(".").rstrip()
    for opening, closing in _WRAPPERS:
        if len(answer) > len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
            return bare(answer[len(opening) : -len(closing)])
    whole = _COMMAND.fullmatch(answer)
    return bare(whole[1]) if whole else answer


def golds(answer: Any) -> list[str]:
    """Every text that is a right answer; empty if the gold is missing, blank or an empty list.

    A list means any of its items. Answer tags, boxes and ``$`` around a gold are taken off.
    """
    return [gold for text in _texts(answer) if (gold := bare(marked if (marked := final_answer(text)) else text))]


def _texts(answer: Any) -> Iterator[str]:
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list | tuple | set | frozenset):
        for item in answer:
            yield from _texts(item)
    elif answer is not None:
        yield str(answer)
