r"""Answers of several parts, compared part by part: lists, points, intervals, inequalities, matrices, named values.

Texts are in the spelling of ``mmrl_rewards.formulas.written``. The values in them are compared by the caller.

A list's order does not count, a point's does. Names in front of values count if both sides have them: ``x = 2, y = 3``
is ``y = 3, x = 2`` and not ``x = 3, y = 2``. Where one side has different names, the values are in the order of the
other side's: ``x = 2, y = 3`` is ``(2, 3)`` and ``2, 3``, and not ``3, 2``. An inequality in one name is its interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmrl_rewards.formulas import NAME
from mmrl_rewards.names import agree, name_of, plain_name, without_subscript

T = TypeVar("T")
Equal = Callable[[str, str], bool]
"""True if two values are equal, the reference's first."""

MAX_PARTS = 40
"""Longer lists are not compared."""
_OPENING, _CLOSING = "([{", ")]}"
_TOKENS = re.compile(
    r"\\(?P<environment>begin|end)(?![A-Za-z])|\\(?P<angle>[lr])angle(?![A-Za-z])|\\[A-Za-z]+|\\[{}]|\\.|[()\[\]{}]"
    r"|(?P<mark>[,;=:<>]|(?<![A-Za-z])(?:and|or)(?![a-z])|[或且和])",
    re.DOTALL,
)
_THOUSAND = re.compile(r"\d{3}(?!\d)")
_RELATIONS = {r"\le": r"\ge", r"\ge": r"\le", "<": ">", ">": "<", r"\ne": r"\ne", r"\in": "", "=": "="}
"""Relations, and each as it is read from the right."""
_CHAIN = re.compile(r"\\(?:approx|simeq)(?![A-Za-z])|≈")
_MATRIX = re.compile(r"\\begin\s*\{([pbB]?matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL)
_MEMBER = re.compile(rf"(?:{NAME.pattern})\s*\\in\s*(\\\{{.*\\\}})", re.VERBOSE | re.DOTALL)
_ALL_WITH = re.compile(
    rf"\\\{{\s*(?:{NAME.pattern})\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?(?:\\mid(?![A-Za-z])|[|:])(.*)\\\}}",
    re.VERBOSE | re.DOTALL,
)
"""A set by its rule: ``\\{x \\mid x > 2\\}``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A value and its name, "" for none; the text is both as written."""

    name: str
    value: str
    text: str


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Parts in a pair of brackets, in order."""

    opening: str
    closing: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals and finite sets, of a named value or of none."""

    name: str
    pieces: tuple[Bracketed, ...]


def same(reference: str, answer: str, equal: Equal) -> bool:
    """True if two texts have equal parts; values that have no parts are the caller's to compare."""
    one, other = region(reference), region(answer)
    if one and other:
        return _same_region(one, other, equal)
    wanted, got = parts(reference), parts(answer)
    if max(len(wanted), len(got)) > MAX_PARTS:
        return False
    if len(wanted) != len(got):
        wanted, got = _alongside(wanted, got), _alongside(got, wanted)
    if len(wanted) != len(got):
        wanted, got = _distinct(wanted), _distinct(got)
    if len(wanted) != len(got):
        return False
    if len(wanted) == 1:
        return _same_part(wanted[0], got[0], equal)
    if _is_ordered(wanted, got):
        return all(_same_part(a, b, equal) for a, b in zip(wanted, got, strict=True))
    return _match(wanted, got, lambda a, b: _same_part(a, b, equal))


def parts(text: str) -> list[Part]:
    """The parts of a list, each with its name, or with the one that the part before it has."""
    text = text.strip()
    member = _MEMBER.fullmatch(text)
    text = _without_braces(member[1] if member else text)
    groups = split(text, ";")
    if len(groups) > 1 and any(len(split(group, ",")) > 1 for group in groups):
        items = [f"({group})" if len(split(group, ",")) > 1 and not bracketed(group) else group for group in groups]
    else:
        items = split(text, ",;")
    made, name = [], ""
    for item in items:
        for spelling in _both_signs(item):
            part = named(spelling)
            name = part.name or name
            made.append(Part(name, part.value, part.text))
    return made


def named(text: str) -> Part:
    """A value and the name before it; of a chain ``x = 2 + 3 = 5`` the value is its end."""
    text = text.strip()
    found = _CHAIN.search(text)
    if found and found.start():
        sides = split(text[: found.start()], "=")
        if len(sides) == 1 and (name := name_of(sides[0])):
            return Part(name, text[found.end() :].strip(), text)
        text = text[: found.start()].strip()
    sides = split(text, "=")
    name = name_of(sides[0]) if len(sides) > 1 and sides[-1] else ""
    return Part(name, sides[-1] if name else text, text)


def split(text: str, marks: str) -> list[str]:
    """The text between marks outside of brackets, ``and`` and ``or`` being commas; one text where there are none."""
    found, begin = [], 0
    for match in _outside(text):
        word = match["mark"]
        is_comma = word == "," or word[0] in "ao或且和"
        if (("," in marks) if is_comma else word in marks) and not _is_thousands(text, match):
            found.append(text[begin : match.start()].strip())
            begin = match.end()
    found.append(text[begin:].strip())
    return [part for part in found if part] if "," in marks else found


def bracketed(text: str) -> Bracketed | None:
    """The parts of a point, an interval or a vector; None if the text is none, or has one part."""
    text = text.strip()
    for opening, closing in ((r"\langle", r"\rangle"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)].strip()
            if (found := _closed_parts(inner)) and len(found) > 1:
                return Bracketed(opening, closing, tuple(found))
    return None


def region(text: str) -> Region | None:
    """The region of an inequality in one name, a membership or a union of intervals; None for other texts."""
    if not any(mark in text for mark in ("<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\cup", "[", "(")):
        return None
    name, pieces = "", list[Bracketed]()
    rule = _ALL_WITH.fullmatch(text.strip())
    for part in _alternatives(rule[1] if rule else text):
        found = _relation(part) or _between(part) or (None if "=" in part else _interval(part))
        if found is None or (pieces and not agree(name, found.name)):
            return None
        name = name or found.name
        pieces.extend(found.pieces)
    return Region(name, tuple(pieces)) if pieces else None


def matrix(text: str) -> list[list[str]] | None:
    """The cells of a matrix, by rows; None if the text is none, or more than one."""
    text = text.strip()
    while text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        text = text[1:-1].strip()
    found = _MATRIX.fullmatch(text)
    if not found or r"\begin" in found[2]:
        return None
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[\d.]+\s?[a-z]{2}\])?", found[2])]
    return [[cell.strip() for cell in row.split("&")] for row in rows if row]


def _same_part(wanted: Part, got: Part, equal: Equal) -> bool:
    if wanted.name and got.name and not agree(wanted.name, got.name):
        return False
    rows, cells = matrix(wanted.value), matrix(got.value)
    if rows and cells:
        return _same_cells(rows, cells, equal)
    one, other = region(wanted.value), region(got.value)
    if one and other:
        return _same_region(one, other, equal)
    pair, couple = bracketed(wanted.value), bracketed(got.value)
    if pair and couple:
        return _same_bracketed(pair, couple, equal)
    if "=" in wanted.value or ("=" in got.value and wanted.name):
        chain = split(wanted.value, "=")
        if "=" in got.text or len(chain) > 2:
            return equal(wanted.text, got.text)
        return False
    return equal(wanted.value, got.value)


def _same_region(wanted: Region, got: Region, equal: Equal) -> bool:
    if not agree(wanted.name, got.name):
        return False
    if _match(wanted.pieces, got.pieces, lambda a, b: _same_bracketed(a, b, equal)):
        return True
    is_union = len(wanted.pieces) + len(got.pieces) > 2
    return is_union and equal(_as_set(wanted), _as_set(got))


def _same_cells(rows: list[list[str]], cells: list[list[str]], equal: Equal) -> bool:
    if list(map(len, rows)) != list(map(len, cells)):
        return False
    pairs = (pair for one, other in zip(rows, cells, strict=True) for pair in zip(one, other, strict=True))
    return all(same(wanted, got, equal) for wanted, got in pairs)


def _same_bracketed(wanted: Bracketed, got: Bracketed, equal: Equal) -> bool:
    if (wanted.opening, wanted.closing) != (got.opening, got.closing) or len(wanted.parts) != len(got.parts):
        return False
    if wanted.opening == r"\{":
        return _match(wanted.parts, got.parts, lambda a, b: same(a, b, equal))
    return all(same(a, b, equal) for a, b in zip(wanted.parts, got.parts, strict=True))


def _match(wanted: Sequence[T], got: Sequence[T], equal: Callable[[T, T], bool]) -> bool:
    """True if each has its own equal on the other side; equality is taken to be transitive."""
    left = list(got)
    for one in wanted:
        place = next((i for i, other in enumerate(left) if equal(one, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _alongside(some: list[Part], others: list[Part]) -> list[Part]:
    """The coordinates of a point, where the other side is a list of as many; a point's name is that of each."""
    inner = bracketed(some[0].value) if len(some) == 1 else None
    if not inner or (inner.opening, inner.closing) not in (("(", ")"), (r"\langle", r"\rangle")):
        return some
    names = bracketed(some[0].name)
    if len(inner.parts) != len(others):
        return some
    made = [named(part) for part in inner.parts]
    if names and len(names.parts) == len(made):
        return [Part(plain_name(name), part.value, part.text) for name, part in zip(names.parts, made, strict=True)]
    return [Part(part.name or f"#{place}", part.value, part.text) for place, part in enumerate(made)]


def _distinct(found: list[Part]) -> list[Part]:
    return list({(part.name, "".join(part.value.split())): part for part in found}.values())


def _is_ordered(wanted: list[Part], got: list[Part]) -> bool:
    """True if one side alone has names, and they differ, or stands for a point."""
    names = [{part.name for part in side} for side in (wanted, got)]
    if any(name.startswith("#") for side in names for name in side):
        return True
    if (names[0] == {""}) == (names[1] == {""}):
        return False
    return len({without_subscript(name) for name in names[0] | names[1] if name}) > 1


def _outside(text: str) -> Iterator[re.Match[str]]:
    """The marks outside of brackets; none after a bracket that closes nothing."""
    depth = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        if match["mark"]:
            if not depth:
                yield match
        elif token in _OPENING or token == r"\{" or match["environment"] == "begin" or match["angle"] == "l":
            depth += 1
        elif token in _CLOSING or token == r"\}" or match["environment"] == "end" or match["angle"] == "r":
            depth -= 1
            if depth < 0:
                return


def _is_thousands(text: str, match: re.Match[str]) -> bool:
    """True for the comma of ``1,000``, as numbers are read."""
    before = text[max(0, match.start() - 1) : match.start()]
    return match[0] == "," and before.isdigit() and bool(_THOUSAND.match(text, match.end()))


def _closed_parts(inner: str) -> list[str] | None:
    """The parts between brackets; None if a bracket in there closes the outer one."""
    depth = 0
    for match in _TOKENS.finditer(inner):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(match[0], 0)
        if depth < 0:
            return None
    return split(inner, ",;")


def _without_braces(text: str) -> str:
    """The elements of a set, or what one pair of braces or parentheses holds."""
    for opening, closing in ((r"\{", r"\}"), ("{", "}"), ("(", ")")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            inner = text[len(opening) : -len(closing)]
            if (
                inner.strip() != r"\emptyset"
                and _is_closed(inner, opening, closing)
                and (opening != "(" or len(split(inner, ",;")) == 1)
            ):
                return _without_braces(inner.strip())
    return text


def _is_closed(inner: str, opening: str, closing: str) -> bool:
    depth = 0
    for match in _TOKENS.finditer(inner):
        depth += (match[0] == opening) - (match[0] == closing)
        if depth < 0:
            return False
    return True


def _both_signs(text: str) -> list[str]:
    """A value with one ``\\pm``, as two."""
    if text.count(r"\pm") != 1 or r"\mp" in text:
        return [text]
    return [re.sub(r"\\pm\s*", sign, text) for sign in ("+", "-")]


def _alternatives(text: str) -> list[str]:
    """The texts between ``\\cup``, or between ``or``, outside of brackets."""
    found, begin = [], 0
    depth_or = [match for match in _outside(text) if match["mark"] in ("or", "或")]
    for match in depth_or:
        found.append(text[begin : match.start()])
        begin = match.end()
    found.append(text[begin:])
    return [piece.strip() for part in found for piece in re.split(r"\\cup(?![A-Za-z])", part) if piece.strip()]


_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[<>=]")


def _relation(text: str) -> Region | None:
    """The interval of an inequality in one name, or of a membership."""
    sides, signs, begin = list[str](), list[str](), 0
    depth = 0
    for match in re.finditer(r"\\[{}]|[()\[\]{}]|" + _RELATION.pattern, text):
        if not _RELATION.fullmatch(match[0]):
            depth += 1 if match[0][-1] in _OPENING else -1
        elif not depth:
            sides.append(text[begin : match.start()].strip())
            signs.append(match[0])
            begin = match.end()
    sides.append(text[begin:].strip())
    if len(sides) == 3 and (name := name_of(sides[1])) and "|" not in name:
        low, high = (sides[0], sides[2]) if signs[0] in ("<", r"\le") else (sides[2], sides[0])
        first, second = signs if signs[0] in ("<", r"\le") else (signs[1], signs[0])
        if {first, second} <= {"<", r"\le"} or {first, second} <= {">", r"\ge"}:
            brackets = "(" if first in "<>" else "[", ")" if second in "<>" else "]"
            return Region(name, (Bracketed(*brackets, (low, high)),))
    if len(sides) != 2:
        return None
    sign, (left, right) = signs[0], sides
    if not name_of(left) and sign != r"\in":
        sign, left, right = _RELATIONS[sign], right, left
    name = name_of(left)
    if not name or "|" in name or not right or name_of(right):
        return None
    if sign == r"\in":
        found = _interval(right)
        return found and Region(name, found.pieces)
    return Region(name, _pieces(sign, right)) if sign != "=" else None


def _between(text: str) -> Region | None:
    """The interval of two inequalities in one name with ``and`` between them, one from below and one from above."""
    marks = [match for match in _outside(text) if match["mark"] in ("and", "且")]
    if len(marks) != 1:
        return None
    one, other = _relation(text[: marks[0].start()].strip()), _relation(text[marks[0].end() :].strip())
    if not one or not other or one.name != other.name or len(one.pieces) + len(other.pieces) > 2:
        return None
    above, below = (one.pieces[0], other.pieces[0])
    if above.parts[-1] != r"\infty":
        above, below = below, above
    if above.parts[-1] != r"\infty" or below.parts[0] != r"-\infty":
        return None
    return Region(one.name, (Bracketed(above.opening, below.closing, (above.parts[0], below.parts[-1])),))


def _pieces(sign: str, bound: str) -> tuple[Bracketed, ...]:
    below, above = (r"-\infty", bound), (bound, r"\infty")
    return {
        "<": (Bracketed("(", ")", below),),
        r"\le": (Bracketed("(", "]", below),),
        ">": (Bracketed("(", ")", above),),
        r"\ge": (Bracketed("[", ")", above),),
        r"\ne": (Bracketed("(", ")", below), Bracketed("(", ")", above)),
    }[sign]


def _interval(text: str) -> Region | None:
    """An interval of two ends, or a finite set."""
    text = text.strip()
    if text.startswith(r"\{") and text.endswith(r"\}"):
        elements = split(text[2:-2], ",;")
        return Region("", (Bracketed(r"\{", r"\}", tuple(elements)),)) if elements else None
    found = bracketed(text)
    if not found or len(found.parts) != 2 or found.opening not in "([":
        return None
    return Region("", (Bracketed(found.opening, found.closing, tuple(part.lstrip("+ ") for part in found.parts)),))


def _as_set(found: Region) -> str:
    return r" \cup ".join(f"{piece.opening}{', '.join(piece.parts)}{piece.closing}" for piece in found.pieces)
