"""Reads the choices of a question from a cell, and lists them after the question."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import string
import warnings
from collections.abc import Sequence
from typing import Any

from mmrl.errors import DataError

MAX_CHOICES = len(string.ascii_uppercase)
MAX_TEXT = 65_536
"""Characters of a list that is written as text."""

_COMMANDS = """
    acute aleph alpha amalg angle approx approxeq arccos arcsin arctan arg ast bar because begin beta beth between
    big Big bigcap bigcup bigg Bigg bigl bigr binom blacksquare bm bmod boldsymbol bot bowtie boxed breve bullet bump
    fbox flat forall frac frown nabla natural ne nearrow neg neq nexists nleq ngeq nmid nolimits not notin nparallel
    nsim nsubseteq nu nwarrow rangle rbrace rbrack rceil rfloor rho right rightarrow rightharpoonup
    rightleftharpoons rm root rtimes rVert rvert tan tanh tau tbinom text textbf textit textrm tfrac therefore theta
    tilde times tiny to top triangle triangleleft triangleq triangleright tt twoheadrightarrow underbrace underline
    underset uparrow updownarrow uplus upsilon varepsilon varnothing varphi varpi varrho varsigma vartheta vdash vDash
    vdots vec vee verb vert Vert vphantom vspace xi xleftarrow xrightarrow Updownarrow Uparrow Upsilon"""
_LATEX = frozenset(_COMMANDS.split())
"""Commands whose backslash and first letter are an escape in Python or JSON."""
_ESCAPE = re.compile(r"\\\\|\\([A-Za-z]+)")
_NO_TEXT = re.compile("[\0-\x08\v\f\x0e-\x1f\x7f\ud800-\udfff]|\r(?!\n)|[\t\n](?=[A-Za-z])")
"""Characters that no choice contains on purpose; a tab or a line break before a letter may be an unlisted command."""


def read_choices(value: Any, where: str) -> tuple[str, ...]:
    """The choices of a cell: a list, or one that is written as text (``"['3', '4']"``); null and empty are none.

    In a text, commands of LaTeX may have one backslash or two: ``"['\\theta']"`` is a theta.

    Raises:
        DataError: The cell is no list of at most 26 texts or numbers, or its text has escapes of no character.
    """
    if isinstance(value, str):
        value = _literal(value, where)
    if value is None:
        return ()
    if not _is_list(value) or not all(_is_choice(each) for each in value):
        raise DataError("The choices are no list of texts or numbers", where=where, possible="['3', '4', 'none']")
    if len(value) > MAX_CHOICES:
        raise DataError(f"There are {len(value)} choices", where=where, possible=f"up to {MAX_CHOICES}, A to Z")
    return tuple(str(each) for each in value)


def with_choices(text: str, choices: Sequence[str]) -> str:
    """The question with its choices as "(A) ...", one a line, unless they are listed in it already."""
    if not choices or _are_listed(text, choices):
        return text
    listed = (f"({letter}) {choice}" for letter, choice in zip(string.ascii_uppercase, choices, strict=False))
    return "\n".join([text, *listed])


def _literal(text: str, where: str) -> Any:
    """A list written as JSON or Python, read without evaluating anything."""
    if not text.strip():
        return None
    if len(text) > MAX_TEXT:
        raise DataError(f"The choices have {len(text)} characters", where=where, possible=f"up to {MAX_TEXT}")
    text = _ESCAPE.sub(lambda escape: f"\\{escape[0]}" if escape[1] in _LATEX else escape[0], text.strip())
    value = _parsed(text, where)
    texts = [each for each in value if isinstance(each, str)] if _is_list(value) else []
    if broken := next(filter(_NO_TEXT.search, texts), None):
        raise DataError(
            f"The choices hold an escape that is no text: it makes {broken[:100]!a}",
            where=where,
            remedy="write each backslash of LaTeX twice, or let the column be a list and not a text",
        )
    return value


def _parsed(text: str, where: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):  # JSON first: it knows the two escapes of an emoji as one
        return json.loads(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # LaTeX has backslashes that Python does not know
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise DataError("The choices are no list", where=where, possible="\"['3', '4']\"") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_choice(value: Any) -> bool:
    is_short = not isinstance(value, int) or abs(value) < 10**100  # Python refuses to write huge numbers
    is_one = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return is_one and is_short and value == value  # NaN is none


def _are_listed(text: str, choices: Sequence[str]) -> bool:
    """True if the text has all choices one after the other, each after its letter, and then the line ends.

    With other text between or after them they may be part of the question: "Fig. A: 10 cm, B: 20 cm" lists no 10.
    """
    if not all(choice.strip() for choice in choices):
        return False
    labelled = zip(string.ascii_uppercase, choices, strict=False)
    each = [rf"(?:\(|(?<!\w)){letter}[).:]\s*+{re.escape(choice.strip())}" for letter, choice in labelled]
    return re.search(r"[\s,;.]*+".join(each) + r"[ \t,;.]*+(?:\n|\Z)", text) is not None
