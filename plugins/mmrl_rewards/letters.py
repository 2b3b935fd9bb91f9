"""One spelling for letters that Unicode has several spellings of."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

_WIDTHS = {
    code: unicodedata.normalize("NFKC", chr(code))
    for code in range(0xFF01, 0xFFEF)
    if unicodedata.decomposition(chr(code)).startswith(("<wide>", "<narrow>"))
}
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff\u00ad\u200e\u200f\u202a\u202c"), None)
_ALIKE = (
    _WIDTHS
    | _INVISIBLE
    | dict.fromkeys(map(ord, "\u00a0\u202f\u2007\u2009\u200a\u3000"), " ")
    | dict.fromkeys(map(ord, "−﹣\u2010\u2011"), "-")
    | dict.fromkeys(map(ord, "‘’ʼ"), "'")
    | dict.fromkeys(map(ord, "“”"), '"')
    | {ord("、"): ","}
)
_LIST = re.compile(r"(?<=[0-9])，\s*(?=[0-9])|(?<=\d)、\s*(?=\d)")
"""A comma between numbers that is no thousands separator, as ``，`` between digits of full width can be."""
_MOST_MARKS = 30
"""Longest run of combining marks that is composed, Unicode's own bound (UAX 15): the time grows with its square."""


def folded(text: str) -> str:
    """The text with composed letters and ASCII for characters that look or mean the same, in linear time.

    Full and half width are one, as are kinds of spaces, the minus sign and the hyphen, straight and curly quotation
    marks, an ideographic and another comma; characters without width are left out. Powers, fractions, ligatures, dashes
    and digits of other scripts stay.
    """
    if text.isascii():
        return text
    text = _LIST.sub(", ", text).translate(_ALIKE)
    return text if _many_marks().search(text) else unicodedata.normalize("NFC", text)


@cache
def _many_marks() -> re.Pattern[str]:
    marks = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.combining(chr(code)))
    return re.compile(f"[{marks}]{{{_MOST_MARKS + 1}}}")
