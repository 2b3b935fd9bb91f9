"""Finds the answer of a completion, and the texts that a dataset's reference answer accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Extract = Literal["auto", "boxed", "last_number", "whole"]
"""The part of a completion that is searched for an answer; see ``extract``."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(rf"(?P<box>{_BOX.pattern})|\\.|(?P<open>\{{)|(?P<close>\}})", re.DOTALL)
_AFTER_BOX = re.compile(r"(?:[\s.$*。]|\\[\])])*+")
_CUT = re.compile(rf"{_BOX.pattern}|<answer>")
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_SAID = re.compile(
    r"(?:\banswer\s{0,9}\*{0,2}\s{0,9}(?:is|:|=|would be|should be)(?:\s{0,9}:)?"
    "|(?:答案|结果)\\*{0,2}\\s{0,9}(?:是|为|选|[:\uff1a])+|(?:故选|应选|选择)[:\uff1a]?)\\*{0,2}",
    re.IGNORECASE,
)
_SAID_END = re.compile(
    "\n|[。;\uff1b]|\\.(?=\\*{0,2}\\s|\\W*\\Z)|,?\\s(?:because|since)\\b|[,\uff0c]\\s*(?:so|which|where|as|因为)"
)
_NUMBER = re.compile(r"(?<!\w)(?<!\d\.)-?(?:\d+(?:,\d{3})*(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?%?")
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")]
_COMMAND = re.compile(r"\\(?:boxed|fbox|text|mathrm|textbf|mathbf|textit|mathit|displaystyle)\s*\{([^{}]*)\}")
GOLD_KEYS = ("answer", "value", "ground_truth", "text")
"""Keys under which a mapping has its reference."""
_LAYERS = 8
"""Most wrappers that are taken off; no person writes more."""


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}`` or ``\\fbox{...}``, nested braces included; linear in the text."""
    last = max(_boxes(text), default=None)
    return text[slice(*last)].strip() if last else None


def is_box_at_end(text: str) -> bool:
    """True if a box that is not blank ends the text; a full stop and the end of a formula may follow."""
    outer = max(_boxes(text), key=lambda box: box[1], default=None)
    return bool(outer and text[slice(*outer)].strip() and _AFTER_BOX.fullmatch(text, outer[1] + 1))


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every complete box's content."""
    first = _BOX.search(text)
    if not first:
        return
    opened = list[int | None]()
    for match in _BRACES.finditer(text, first.start()):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened and (start := opened.pop()) is not None:
            yield start, match.start()


def last_tagged(text: str) -> str | None:
    """The content of the last complete ``<answer>...</answer>``."""
    before, closed, _ = text.rpartition(_TAG_CLOSE)
    _, opened, answer = before.rpartition(_TAG_OPEN)
    return answer.strip() if closed and opened else None


def final_answer(text: str) -> str | None:
    """The answer that the text marks as such: in answer tags, in a box, or in a box within the tags."""
    tagged = last_tagged(text)
    boxed = last_boxed(text if tagged is None else tagged)
    return tagged if boxed is None else boxed


def said_answer(text: str) -> str | None:
    """The text after the last "the answer is", "Answer:" or "答案是", up to the end of the sentence."""
    starts = [match.end() for match in _SAID.finditer(text)]
    if not starts:
        return None
    said = text[starts[-1] :].lstrip()
    end = _SAID_END.search(said)
    return said[: end.start()].strip() if end else said.strip()


def before_cut(text: str) -> str:
    """The part of a text without a complete box or answer tag that comes before one that is cut off."""
    cut = _CUT.search(text)
    return text[: cut.start()] if cut else text


def last_number(text: str) -> str | None:
    """The last number: ``-3``, ``1,000``, ``0.5``, ``3/4``, ``50%``."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def extract(text: str, where: Extract) -> str | None:
    """The completion's answer, bare.

    Args:
        where: ``boxed``, in a box or answer tags; ``last_number``, the last number; ``whole``, all of the text; or
            ``auto``, in a box or answer tags, else after "the answer is", else all of the text.
    """
    if where == "whole":
        return bare(text)
    if where == "last_number":
        return last_number(text)
    answer = final_answer(text)
    if answer is None and where == "auto":
        answer = said_answer(begun := before_cut(text)) or begun
    return None if answer is None else bare(answer)


def marked_or_number(text: str) -> str | None:
    """The answer in a box or answer tags, else after "the answer is", else the last number; bare."""
    answer = final_answer(text)
    if answer is None:
        answer = said_answer(begun := before_cut(text)) or last_number(begun)
    return None if answer is None else bare(answer)


def bare(answer: str) -> str:
    """The answer without ``$``, ``\\(``, ``**``, ``\\text{}``... around it, nor a full stop, single spaces.

    A ``**`` without its other half, as sentences of bold text leave it when they are cut, goes too.
    """
    for _ in range(_LAYERS):
        outer = answer = " ".join(answer.split()).removesuffix("。").removesuffix(".").rstrip()
        for opening, closing in _WRAPPERS:
            if len(answer) > len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
                answer = answer[len(opening) : -len(closing)]
                break
        else:
            whole = _COMMAND.fullmatch(answer)
            answer = whole[1] if whole else answer
        if answer.count("**") == 1:
            answer = answer.removeprefix("**").removesuffix("**").strip()
        if answer == outer:
            break
    return answer


def references(answer: Any) -> list[str]:
    """Every text that is a right answer; empty if the reference is missing, blank, NaN or an empty list.

    A list means any of its items; a mapping, what is under the first of ``GOLD_KEYS`` that it has, nothing without
    one. A float that is a whole number may be written as one. Answer tags, boxes and ``$`` around a reference are taken
    off.
    """
    return [
        reference for text in _texts(answer) if (reference := bare(marked if (marked := final_answer(text)) else text))
    ]


def _texts(answer: Any) -> Iterator[str]:
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list | tuple | set | frozenset):
        for item in answer:
            yield from _texts(item)
    elif isinstance(answer, Mapping):
        yield from _texts(next((answer[key] for key in GOLD_KEYS if key in answer), None))
    elif answer is not None and not (isinstance(answer, float) and math.isnan(answer)):
        if isinstance(answer, float) and answer.is_integer():
            yield str(int(answer))
        yield str(answer)
