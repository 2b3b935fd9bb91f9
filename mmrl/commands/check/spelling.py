"""How a person writes a reference answer: a grader that is asked with the text of the data itself accepts any text.

A number from a column of floats is written as its shortest decimal. LaTeX that is broken off is written whole. A sound
text has other spellings too: LaTeX without dollars and spaces, a number without separators, an answer without the
sentence around it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

_DECIMAL = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
_NOISY_DIGITS = 12
"""Fewest digits of a decimal that may be another one with rounding noise."""
_PRECISE_DIGITS = 10
"""Most digits that are left of a float64 without its noise."""
_SINGLE_DIGITS = 6
"""Most digits of a text that a float32 rounds; it holds some seven."""
_STATED = re.compile(
    r"(?:.*\n\s*####|(?:.*[.\n]\s*)?\W*(?:so |thus |therefore,? |hence,? )?(?:the )?"
    r"(?:(?:final|correct|right) )?answer(?: is)?:?)\s+(?P<answer>\S.*)",
    re.DOTALL | re.IGNORECASE,
)
"""A text that states an answer at its end: ``The answer is 5``, ``Answer: 5``, or a solution and ``#### 5``."""
_TAIL = 400
"""Most characters at the end of a text in which it may state its answer."""
_DELIMITERS = ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), ("<answer>", "</answer>")
_ESCAPED = re.compile(r"\\[\\{}$]")
_SPACING = re.compile(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[!,;: ]")
_WORDS = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|textnormal)\s*\{([^{}]*)\}")


def written(answer: Any) -> list[str]:
    """A reference answer as a person writes it; a list may mean any of its items or, as a box does, the whole."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, float):
        return [_shortest(answer)]
    if isinstance(answer, str):
        return [_noiseless(answer) if _DECIMAL.fullmatch(answer.strip()) else mended(answer)]
    if not isinstance(answer, list | tuple) or not answer:
        return [str(answer)]
    return [*written(answer[0])[:1], json.dumps(_rounded(answer), default=str)]


def mended(text: str) -> str:
    """LaTeX with as many closing braces as opening ones, and nothing where it has nothing but delimiters.

    Any other text comes back as it is.
    """
    if not re.search(r"[$\\]", text):
        return text
    if not re.search(r"[^\s${}\\()\[\]]", text.replace(r"\boxed", "")):
        return ""
    depth, kept = 0, list[str]()
    for part in re.findall(r"\\[\\{}$]|.", text, re.DOTALL):
        if part == "}" and not depth:
            continue
        depth += (part == "{") - (part == "}")
        kept.append(part)
    return "".join(kept) + "}" * depth


def respelled(text: str) -> str | None:
    """Another spelling of the same answer; None if there is none that differs."""
    found = text.strip()
    if stated := _STATED.fullmatch(f"\n{found}"[-_TAIL:]):
        found = stated["answer"].removesuffix(".")
    found = _boxed(found)
    is_latex, before = False, ""
    while found != before:
        before = found
        for opening, closing in _DELIMITERS:
            if _encloses(found, opening, closing):
                found, is_latex = found[len(opening) : -len(closing)].strip(), True
    if is_latex or "\\" in found:
        found = _plain_latex(found)
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", found):
        found = found.replace(",", "")
    if re.fullmatch(r"[+-]?\d+\.\d*", found):
        found = found.rstrip("0").rstrip(".")
    return found if found and found != text.strip() else None


def _boxed(text: str) -> str:
    """The box of a text that has one; else the text itself."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, part in enumerate(rest if text.count(r"\boxed{") == 1 else ""):
        depth += (part == "{") - (part == "}")
        if not depth:
            return f"{box}{rest[: place + 1]}"
    return text


def _encloses(text: str, opening: str, closing: str) -> bool:
    """True if the text is one part between delimiters, and not two such parts."""
    if not (text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)):
        return False
    inner = _ESCAPED.sub("", text[len(opening) : -len(closing)])
    if closing != "}":
        return opening not in inner and closing not in inner
    depths = np.cumsum([(part == "{") - (part == "}") for part in inner])
    return bool((depths >= 0).all() and depths[-1] == 0)


def _plain_latex(text: str) -> str:
    """LaTeX with the same meaning and as little of it as a hurried person writes; tables stay as they are."""
    if r"\begin" in text:
        return text
    text = _SPACING.sub(" ", text)
    text = _WORDS.sub(r" \1", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text).replace(r"\%", "%")
    text = re.sub(r"\s+", " ", text).strip()
    # A space between letters or digits parts words, and one after a brace may begin a unit.
    return re.sub(r"(?<![A-Za-z0-9}%]) | (?![A-Za-z0-9\\])", "", text)


def _shortest(value: float) -> str:
    """The decimal that a float means: of a float32 its shortest one, of a float64 the one without rounding noise."""
    if not math.isfinite(value):
        return str(value)
    if value.is_integer():
        return str(int(value)) if abs(value) < 1e15 else repr(value)
    return _noiseless(repr(value), is_float=True)


def _noiseless(text: str, *, is_float: bool = False) -> str:
    """A decimal without the noise of a float32 or a float64; as it is if it has none.

    Args:
        is_float: True if it was a number; a text's digits may be meant, so less is taken for noise.
    """
    value = float(text)
    if not math.isfinite(value) or _digits(text) < _NOISY_DIGITS:
        return text
    with np.errstate(over="ignore"):
        single = np.float32(value)
    short = np.format_float_positional(single, trim="-")
    if float(single) == value and (is_float or _digits(short) <= _SINGLE_DIGITS):
        return short
    precise = np.format_float_positional(value, precision=_NOISY_DIGITS, fractional=False, trim="-")
    return precise if _digits(precise) <= _PRECISE_DIGITS else text


def _digits(text: str) -> int:
    """Significant digits of a decimal."""
    return len(re.sub(r"[eE].*|\D", "", text).lstrip("0"))


def _rounded(value: Any) -> Any:
    """A list with its floats as the numbers that they mean."""
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(_shortest(value)) if isinstance(value, float) else value
