r"""Formulas in a text: the one that it ends in, LaTeX in one spelling, and what cannot be read at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from mmrl_rewards.quantities import BEGINS, THOUSANDS, UPRIGHT, last_quantity, plain
from mmrl_rewards.units import known_unit

_TAIL = 2000
"""Characters at a text's end in which a formula is looked for; longer answers are not read."""
_DELIMITER = re.compile(r"\\[\[\]()]|\\.|\$\$?", re.DOTALL)
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_PROSE = re.compile(r"(?<![\\\w{])(?:[A-Za-z]{2,}[,.:;]*\s+){2,}[A-Za-z]{2,}|\n\s*\n")
_NUMBER = re.compile(rf"(?<!\.){BEGINS}\d")
_NEIGHBOURS = re.compile(r"[\s,;]*(?:(?P<joins>and|or|和|或)\b)?[\s,;]*", re.IGNORECASE)
_UNIT_BEHIND = re.compile(r"\s*(\\?%|[A-Za-z°][^.,;:!?\n$\\]{0,30})[\s.]*\Z")
_BRACKETS = re.compile(r"\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"[A-Za-z'’]{2,}[,;:]?|[aI]|.*:", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
NAME = re.compile(
    r"""(?:m\s*(?=\\angle|∠))?
        (?:(?:\\(?:angle|triangle)\b|[∠△])\s*)?
        (?:[A-Za-zα-ωΔ]{1,12}|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|phi|varphi|omega
           |tau|xi|eta|zeta|chi|psi|kappa|Delta|Gamma|Omega|Phi|Sigma|ell)(?![A-Za-z])
         |\\(?:overline|overrightarrow|vec|hat|bar|mathrm|mathbf|mathbb|mathcal|text|operatorname)\s*\{[^{}]*\}
         |\|\s*[A-Z]{2}\s*\|)
        '*(?:_\s*(?:[A-Za-z0-9]|\{[^{}]*\}))*'*
        (?:\(\s*[A-Za-z0-9]+(?:\s*,\s*[A-Za-z0-9]+)*\s*\))?""",
    re.VERBOSE,
)
"""The name of a value: ``x``, ``x_1``, ``f(x)``, ``\\angle ABC``, ``|AB|``."""
_ALONE = re.compile(rf"\s*(?:{NAME.pattern})\s*", re.VERBOSE)

_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z]{2})")
_BOX = re.compile(r"\s*\\boxed\s*\{")
_ASSIGNMENTS = re.compile(
    rf"\s*(?:{NAME.pattern})\s*=[^=]{{1,40}}(?:(?:[,;]|and\b|or(?![a-z]))\s*(?:{NAME.pattern})\s*=[^=]{{1,40}})+",
    re.VERBOSE,
)
_SPELLINGS = (
    (
        re.compile(r"\\(?:left|right|[bB]ig[lr]?|[bB]igg[lr]?)(?![A-Za-z])\s*\.?(?=\s*(?:\\?[\[\](){}|]|\\[lr]|\Z))"),
        "",
    ),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*\\pi(?![A-Za-z])"), r"\\frac{\\pi}"),
    (re.compile(r"\\mathbb\s*([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\lbrace(?![A-Za-z])\s*"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=|=<|≤|⩽"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=|≥|⩾"), r"\\ge "),
    (re.compile(r"\\(?:neq|ne|not\s*=)(?![A-Za-z])|!=|≠"), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"∈"), r"\\in "),
    (re.compile(r"∪"), r"\\cup "),
    (re.compile(r"±"), r"\\pm "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"\\varnothing(?![A-Za-z])|∅|\\\{\s*\\\}|\bempty set\b"), r"\\emptyset "),
    (re.compile(r"(?<!\\)\\(?:q?quad(?![b-zA-Z]{2,}\b)|[;: ]|,(?!\d{3}(?!\d)))|~"), " "),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"(?<!\\)\$"), " "),
    (re.compile(UPRIGHT + r"\{\s*,?\s*(and|or|,|;)\s*,?\s*\}"), r" \1 "),
)
_SCRIPT = r"\s*[_^]\s*"
_BASED = re.compile(
    rf"((?:\\[A-Za-z]+|(?<![A-Za-z\\])[A-Za-z])(?:{_SCRIPT}(?:\{{[^{{}}]*\}}|[A-Za-z0-9]))*{_SCRIPT})([A-Za-z0-9])"
)


class Formula(NamedTuple):
    """A formula, and where its delimiters begin and end."""

    text: str
    begin: int
    end: int


def formulas(text: str) -> Iterator[Formula]:
    """The formulas between ``$``, ``$$``, ``\\(``, ``\\[``, in order; amounts of money are none; linear in the text."""
    opened: re.Match[str] | None = None
    for match in _DELIMITER.finditer(text):
        mark = match[0]
        if opened and mark == _CLOSING[opened[0]] and not _PROSE.search(found := text[opened.end() : match.start()]):
            if found.strip():
                yield Formula(found.strip(), opened.start(), match.end())
            opened = None
        elif mark in _CLOSING:
            opened = match


def is_name(text: str) -> bool:
    """True if a formula is the name of a value and no more."""
    return bool(_ALONE.fullmatch(text))


def last_value(text: str) -> str | None:
    """The formula that a text ends in, or the number with its unit, if one follows; None if it has neither.

    Formulas that are only a name, as in ``12 values of $n$``, count where there is nothing else. Formulas with ``and``
    or ``or`` between them are one answer, and so are named values that are all of the text.
    """
    tail = text[-_TAIL:]
    found = list(formulas(tail)) if "$" in tail or "\\" in tail else []
    if not found:
        if "=" in text and len(text) < _TAIL and _ASSIGNMENTS.fullmatch(text):
            return text.strip()
        return (_latex_at_end(tail) if "\\" in tail else None) or last_quantity(text)
    place = next((i for i in reversed(range(len(found))) if not is_name(found[i].text)), None)
    numbers = _without(tail, found[0 if place is None else place + 1 :], 0 if place is None else found[place].end)
    if _NUMBER.search(numbers):
        return last_quantity(numbers)
    place = len(found) - 1 if place is None else place
    return _joined(tail, found[: place + 1]) + _unit_behind(tail[found[place].end :])


def _without(text: str, found: list[Formula], begin: int) -> str:
    parts = []
    for formula in found:
        parts.append(text[begin : formula.begin])
        begin = formula.end
    return " ".join([*parts, text[begin:]])


def _joined(text: str, found: list[Formula]) -> str:
    """The last formula, and those before it that are one answer with it."""
    *earlier, last = found
    joined, begin = [last.text], last.begin
    for formula in reversed(earlier):
        between = _NEIGHBOURS.fullmatch(text, formula.end, begin)
        if not between or not (between["joins"] or len(joined) > 1):
            break
        joined.append(formula.text)
        begin = formula.begin
    return ", ".join(reversed(joined))


def _unit_behind(text: str) -> str:
    match = _UNIT_BEHIND.match(text)
    return f" {match[1]}" if match and known_unit(match[1].removeprefix("\\")) else ""


def _latex_at_end(text: str) -> str | None:
    """The last line's end from the first word on that is no prose, if it has a command."""
    line = text.rstrip(" \n.").rpartition("\n")[2]
    begin, depth = len(line), 0
    for word in reversed(list(re.finditer(r"\S+", line))):
        depth += word[0].count("}") - word[0].count("{")
        if depth <= 0 and _WORD.fullmatch(word[0]):
            break
        begin = word.start()
    return line[begin:] if _COMMAND.search(line, begin) else None


@lru_cache(maxsize=4096)
def written(text: str) -> str:
    """LaTeX in one spelling of fractions, relations, blanks and brackets."""
    text = THOUSANDS.sub("", plain(text))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _BASED.sub(r"\1{\2}", _BASED.sub(r"\1{\2}", text))
    return " ".join(text.split())


def unescaped(reference: str) -> str:
    """A reference whose backslashes were escaped twice, ``\\\\frac{1}{2}``, as LaTeX.

    Such texts come out of logs. Where the log has lost the end of a box around all of it, the box is taken off.
    """
    if r"\begin" in reference or not _ESCAPED_TWICE.search(reference):
        return reference
    text = _ESCAPED_TWICE.sub(r"\\", reference)
    box = _BOX.match(text)
    return text[box.end() :].strip() if box and is_readable(text[box.end() :]) else text


_VALUES = re.compile(
    r"\\(?:infty|pi|emptyset|alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|[tT]heta|kappa|[lL]ambda|mu|nu|[xX]i|rho"
    r"|[sS]igma|tau|(?:var)?phi|Phi|chi|[pP]si|[oO]mega|ell|hbar|mathbb\s*\{\w\})"
)
_ARGUMENT = r"\s*(?:\{(?!\s*\})|\\[A-Za-z]+|[A-Za-z0-9])"
_LACKS_ARGUMENT = re.compile(rf"\\(?:sqrt|frac|binom)(?![A-Za-z])\s*(?:\[[^\]]*\])?+(?!{_ARGUMENT})")
_FRACTION = re.compile(r"\\(?:frac|binom)(?![A-Za-z])\s*")
_DANGLING = re.compile(
    r"\A\s*[*/^_]|(?:[=<>*/^_]|\\(?:cdot|times|div|pm|le|ge|ne|in|cup|cap|approx|sim)|(?<=[\d)}\s])[-+])\s*\Z"
)
_OVER_ZERO = re.compile(r"\\frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{\s*0+\s*\}|0)|\d\s*/\s*0+(?![\d.])")
_LABEL = re.compile(r"[A-Za-z0-9]{1,3}[).:\]].*", re.DOTALL)


@lru_cache(maxsize=4096)
def is_readable(reference: str) -> bool:
    """True if a reference is a whole one: braces and brackets closed, arguments there, and something to compare."""
    text = written(reference)
    content = _COMMAND.sub(" ", _VALUES.sub("x", text))
    if not re.search(r"[^\W_]", content) or text.casefold() in ("nan", "null"):
        return False
    if not _is_balanced(text) or text.count(r"\begin") != text.count(r"\end"):
        return False
    if _LACKS_ARGUMENT.search(text) or _DANGLING.search(text) or _OVER_ZERO.search(text):
        return False
    return all(_has_two_arguments(text, match.end()) for match in _FRACTION.finditer(text))


def _is_balanced(text: str) -> bool:
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    if text.count(r"\{") != text.count(r"\}") and r"\\" not in text:  # one brace beside the lines of a system
        return False
    opened, closed = sum(map(text.count, "([")), sum(map(text.count, ")]"))
    return not depth and (opened == closed or (closed > opened and bool(_LABEL.fullmatch(text))))


def _has_two_arguments(text: str, place: int) -> bool:
    first = argument_end(text, place)
    return first is not None and argument_end(text, first) is not None


def argument_end(text: str, place: int) -> int | None:
    """Where a command's argument that begins at a place ends; None if there is none, or it is blank."""
    match = re.compile(r"\s*(?:(\{)|\\[A-Za-z]+|[A-Za-z0-9])").match(text, place)
    if not match or not match[1]:
        return match.end() if match else None
    depth = 1
    for bracket in _BRACKETS.finditer(text, match.end()):
        depth += {"{": 1, "}": -1}.get(bracket[0], 0)
        if not depth:
            return bracket.end() if text[match.end() : bracket.start()].strip() else None
    return None
