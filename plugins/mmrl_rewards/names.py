"""Names of values in one spelling: ``x``, ``x_1``, ``f(x)``, ``\\angle ABC``, ``(x, y)``, ``a:b``."""

from __future__ import annotations

import re

from mmrl_rewards.formulas import NAME

_MANY = (
    NAME.pattern,
    rf"\(\s*(?:{NAME.pattern})(?:\s*,\s*(?:{NAME.pattern}))+\s*\)",
    rf"(?:{NAME.pattern})(?:\s*:\s*(?:{NAME.pattern}))+",
    rf"(?:{NAME.pattern})\s*/\s*(?:{NAME.pattern})",
    rf"\\frac\s*\{{\s*(?:{NAME.pattern})\s*\}}\s*\{{\s*(?:{NAME.pattern})\s*\}}",
)
_NAMES = re.compile("|".join(f"(?:{pattern})" for pattern in _MANY), re.VERBOSE)
_FUNCTIONS = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|and|or|pi|sqrt|oo|infinity")
_UNNAMED = re.compile(
    r"m\s*(?=\\angle|∠)|\\(?:angle|triangle|text|mathrm|mathbf|overline|vec|bar|hat)(?![A-Za-z])|[\s{}∠△]"
)
_ARGUMENT = re.compile(r"\([a-z]\)\Z")
_SUBSCRIPT = re.compile(r"_.*|\d+\Z")


def agree(one: str, other: str) -> bool:
    """True if either is none, or they are the same, or the one is the other's with a subscript: ``x`` and ``x_1``."""
    if not one or not other or one == other or "#" in one + other:
        return True
    return one == without_subscript(other) or other == without_subscript(one)


def name_of(text: str) -> str:
    """The name that a text is; "" if it is none."""
    text = text.strip()
    if not _NAMES.fullmatch(text) or _FUNCTIONS.fullmatch(text.lstrip("\\")):
        return ""
    return plain_name(text)


def plain_name(text: str) -> str:
    """A name in one spelling; an angle, a side or a triangle may be named from either end, ``f(x)`` is ``f(n)``."""
    text = _ARGUMENT.sub("", _UNNAMED.sub("", text))
    return "".join(sorted(text)) if re.fullmatch(r"\|?[A-Z]{2,}\|?", text) else text


def without_subscript(name: str) -> str:
    """``x`` of ``x_1`` and ``x1``."""
    return _SUBSCRIPT.sub("", name)
