"""Finds the answer of a completion, and the texts that a dataset's reference answer accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mmrl.types import Rollout
from mmrl_rewards.letters import folded
from mmrl_rewards.quantities import NUMBER
from mmrl_rewards.thinking import reply, reply_of

T = TypeVar("T")
Extract = Literal["auto", "boxed", "last_number", "whole"]
"""The part of a completion that is searched for an answer; see ``extract``."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACES = re.compile(rf"(?P<box>{_BOX.pattern})|\\.|(?P<open>\{{)|(?P<close>\}})", re.DOTALL)
_AFTER_BOX = re.compile(r"(?:[\s.$*。]|\\[\])])*+")
_NEIGHBOURS = re.compile(
    r"(?:\n[^\S\n]*(?:[-•]|\d{1,2}[.)])\s|[^\S\x1f]|[{}$&*~,;，；、]|\\(?:text|mbox|mathrm|textrm|q?quad)\b|\\[()\[\],;:!\s\\]|\b(?:and|or)\b|以及|[和或及与]"
    r"|(?<![\w\\])[a-z](?:_\{?\w{1,3}\}?)?\s*=)*+",
    re.IGNORECASE,
)
"""Text between boxes that are one answer; thinking between them (``thinking.GAP``) is not."""
_CUT = re.compile(rf"{_BOX.pattern}|<(?i:answer)>")
_BLANK = re.compile(rf"{_BOX.pattern}\s*\}}|<(?i:answer)>\s*</(?i:answer)>")
_TAG = re.compile(r"<(?P<close>/?)(?i:answer)>")
_SAID = re.compile(
    r"(?:\b(?:answers?|(?:correct|right|best|final)\s(?:option|choice|letter))\s{0,9}\*{0,2}\s{0,9}"
    r"(?:is|are|:|=|would be|should be)(?:\s{0,9}:)?"
    "|(?:答案|结果)\\*{0,2}\\s{0,9}(?:(?=不是|不为|不可能)|(?:是|为|选|[:\uff1a])+)|(?:故选|应选|选择)[:\uff1a]?)\\*{0,2}",
    re.IGNORECASE,
)
_SAID_END = re.compile(
    "\n|[。;\uff1b]|\\.(?=\\*{0,2}\\s|\\W*\\Z)|,?\\s(?:because|since)\\b|[,\uff0c]\\s*(?:so|which|where|as|因为)"
)
_BLOCK = re.compile(r"\$\$.*?\$\$|\\\[.*?\\\]", re.DOTALL)
"""A formula on lines of its own, which may have several."""
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]
_COMMAND = re.compile(r"\\(?:boxed|fbox|text|mathrm|textbf|mathbf|textit|mathit|displaystyle)\s*\{([^{}]*)\}")
GOLD_KEYS = ("answer", "value", "ground_truth", "text")
"""Keys under which a mapping has its reference."""
_DASHES = dict.fromkeys(map(ord, "–—"), "-")
_LONG_DECIMAL = re.compile(r"-?0*(?=(?:\.?\d){16})\d*\.\d{1,40}(?:[eE][-+]?\d{1,3})?")
"""A number with more digits than people write: one that a program computed."""
_ROUNDING = 1e-12
"""Noise of a computed float64, as a share."""
_LAYERS = 8
"""Most wrappers that are taken off; no person writes more."""


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer that a text marks as such.

    Attributes:
        text: The content of the marks; contents of several boxes that are one answer have commas between them.
        end: Place in the text where the marks end.
    """

    text: str
    end: int


def marked_answer(text: str) -> Marked | None:
    """The answer in the last complete answer tags, in a box, or in a box within the tags.

    Boxes with nothing between them but a comma, "and", "or" or the name of a value are one answer.
    """
    tagged = _last_tagged(text)
    boxed = _last_boxes(text if tagged is None else tagged.text)
    return boxed if tagged is None else Marked(boxed.text if boxed else tagged.text, tagged.end)


def final_answer(text: str) -> str | None:
    """The text of the marked answer; see ``marked_answer``."""
    marked = marked_answer(text)
    return marked.text if marked else None


def last_boxed(text: str) -> str | None:
    """Content of the last complete box, or of neighbouring ones at the end; see ``marked_answer``."""
    boxed = _last_boxes(text)
    return boxed.text if boxed else None


def last_tagged(text: str) -> str | None:
    """The content of the last complete ``<answer>...</answer>`` that is not blank."""
    tagged = _last_tagged(text)
    return tagged.text if tagged else None


def is_box_at_end(text: str) -> bool:
    """True if a box that is not blank ends the text; a full stop and the end of a formula may follow."""
    outer = max(_boxes(text), key=lambda box: box.end, default=None)
    return bool(outer and text[outer.start : outer.end].strip() and _AFTER_BOX.fullmatch(text, outer.end + 1))


def _last_tagged(text: str) -> Marked | None:
    opened, found = None, None
    for tag in _TAG.finditer(text):
        if not tag["close"]:
            opened = tag.end()
        elif opened is not None:
            content, opened = text[opened : tag.start()].strip(), None
            found = Marked(content, tag.end()) if content else found
    return found


class _Box(NamedTuple):
    """A complete box: where its content starts, where that ends, and where its command begins."""

    start: int
    end: int
    begin: int


def _last_boxes(text: str) -> Marked | None:
    """The last box, and those before it that are its neighbours; linear in the text."""
    found = sorted(_boxes(text), reverse=True)
    if not found:
        return None
    last, *earlier = found
    parts, begin = [text[last.start : last.end].strip()], last.begin
    for box in earlier:
        if box.end > begin:
            between = text[box.start : begin]  # a box around it
        else:
            between = text[box.end + 1 : begin]
            if _NEIGHBOURS.fullmatch(between):
                parts.append(text[box.start : box.end].strip())
        if not _NEIGHBOURS.fullmatch(between):
            break
        begin = box.begin
    return Marked(", ".join(dict.fromkeys(reversed(parts))), last.end + 1)


def _boxes(text: str) -> Iterator[_Box]:
    first = _BOX.search(text)
    if not first:
        return
    opened = list[re.Match[str] | None]()
    for match in _BRACES.finditer(text, first.start()):
        if match["box"]:
            opened.append(match)
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            box = opened.pop()
            if box and text[box.end() : match.start()].strip():
                yield _Box(box.end(), match.start(), box.start())


def said_answer(text: str) -> str | None:
    """The text after the last "the answer is", "Answer:" or "答案是", up to the end of the sentence."""
    starts = [match.end() for match in _SAID.finditer(text)]
    if not starts:
        return None
    said = text[starts[-1] :].lstrip()
    block = _BLOCK.match(said)
    end = _SAID_END.search(said, block.end() if block else 0)
    return said[: end.start()].strip() if end else said.strip()


def before_cut(text: str) -> str:
    """The part of a text without a complete box or answer tag that comes before one that is cut off, no blank ones."""
    text = _BLANK.sub(" ", text)
    cut = _CUT.search(text)
    return text[: cut.start()] if cut else text


def last_number(text: str) -> str | None:
    """The last number: ``-3``, ``1,000``, ``0.5``, ``3/4``, ``50%``."""
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def extract(rollout: Rollout, where: Extract) -> str | None:
    """The completion's answer, bare; None if it has none."""
    text = reply_text(rollout)
    if where == "whole":
        return bare(text) or None
    if where == "last_number":
        return last_number(text)
    return next(candidates(text, require_box=where == "boxed"), None)


def reply_text(rollout: Rollout) -> str:
    """The completion without its thinking, in one spelling of letters: the text in which an answer is looked for."""
    return folded(reply_of(rollout))


def candidates(text: str, last: Callable[[str], str | None] = str.strip, *, require_box: bool = False) -> Iterator[str]:
    """The texts that may be the answer, bare, best first. The first one that a reward can read counts.

    That is the marked answer, then what the text says after it to be the answer. In a text without a marked answer it
    is what the text says to be the answer, else what ``last`` finds.

    Args:
        text: The result of ``reply_text``.
        last: Finds an answer that is neither marked nor said.
        require_box: True if only a marked answer counts.
    """
    marked = marked_answer(text)
    if marked:
        yield bare(marked.text)
    if not require_box and (found := unmarked_answer(text, last)):
        yield bare(found)


def unmarked_answer(text: str, last: Callable[[str], str | None] = str.strip) -> str | None:
    """The answer that a text states, after its marked one if it has one, else what ``last`` finds; as written."""
    marked = marked_answer(text)
    begun = before_cut(text[marked.end :] if marked else text)
    said = said_answer(begun)
    return said if said or marked else last(begun)


def first_read(texts: Iterable[str], read: Callable[[str], T | None]) -> T | None:
    """The value of the first text that ``read`` can read; None if it can read none."""
    return next((value for text in texts if (value := read(text)) is not None), None)


def bare(answer: str) -> str:
    """The answer in one spelling, without ``$``, ``\\(``, ``**``, ``\\text{}``... around it, single spaces.

    A ``**`` without its other half, as sentences of bold text leave it when they are cut, goes too.
    """
    answer = folded(answer).translate(_DASHES)
    for _ in range(_LAYERS):
        outer = answer = " ".join(answer.split()).removesuffix("。").removesuffix(".").rstrip()
        for opening, closing in _WRAPPERS:
            if not answer.startswith(opening) or not answer.endswith(closing):
                continue
            inner = answer[len(opening) : -len(closing)]
            if inner and len(answer) > len(opening + closing) and opening not in inner:
                answer = inner
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
    one. A float is also the shortest decimal that is within 1e-12 of it, as a share: 0.30000000000000004 means 0.3. One
    of less than 64 bits is only its shortest decimal. Thinking, answer tags, boxes and ``$`` around a reference are
    taken off.
    """
    found = dict[str, None]()
    for text in _texts(answer):
        said = reply(text)
        marked = final_answer(said)
        found[bare(said if marked is None else marked)] = None
    return [text for text in found if text]


def _texts(answer: Any) -> Iterator[str]:
    if isinstance(answer, np.floating | np.ndarray) and answer.dtype.kind == "f" and answer.dtype.itemsize < 8:
        answer = [float(str(value)) for value in np.ravel(answer)]
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list | tuple | set | frozenset):
        for item in answer:
            yield from _texts(item)
    elif isinstance(answer, Mapping):
        yield from _texts(next((answer[key] for key in GOLD_KEYS if key in answer), None))
    elif isinstance(answer, float) and not math.isfinite(answer):
        yield from [] if math.isnan(answer) else [str(answer)]
    elif isinstance(answer, float):
        yield from (shortest_decimal(answer), str(answer))
    elif answer is not None:
        text = str(answer)
        if _LONG_DECIMAL.fullmatch(text.strip()):
            yield shortest_decimal(float(text))
        yield text


def shortest_decimal(value: float) -> str:
    """The decimal with the fewest digits that is within 1e-12 of a finite number, as a share of it; no exponent."""
    for digits in range(1, 18):
        text = f"{value:.{digits}g}"
        if abs(float(text) - value) <= _ROUNDING * abs(value):
            break
    return f"{Decimal(text):f}"
