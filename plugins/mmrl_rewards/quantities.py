"""Numbers as people write them, with their unit: ``1,200``, ``-3/4``, ``1\\frac{1}{2}``, ``50\\%``, ``48^\\circ``, ``3
cm²``.

Numbers are exact (``Fraction``), bounded in time and size, and never evaluated. Only a text that is unmistakably one
number is read: ``5 or 6``, ``2x``, ``\\sqrt{2}`` and ``3,14`` are not.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from mmrl_rewards.units import WIDE, agree, known_unit, things

_MAX_CHARACTERS = 100
_MAX_DIGITS = 60

_WIDE = {0xFF01 + i: 0x21 + i for i in range(94)}  # full-width forms of ASCII
_SIGNS = _WIDE | dict.fromkeys(map(ord, "−–—﹣"), "-") | dict.fromkeys(map(ord, "⁄∕"), "/") | {0x3000: " "}
_FRACTIONS = {sign: unicodedata.normalize("NFKC", sign).replace("⁄", "/") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"}
_FRACTION = re.compile(rf"(\d?)([{''.join(_FRACTIONS)}])")
_POWERS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_POWER_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = (
    {word: value for value, word in enumerate(_ONES)}
    | {word: 20 + 10 * value for value, word in enumerate(_TENS)}
    | {"hundred": 100, "thousand": 1000}
)
_WORD = "|".join(sorted(_WORDS, key=len, reverse=True))
NUMBER_WORDS = rf"\b(?:a\s+(?=hundred|thousand))?(?:{_WORD})(?:(?:\s+|-|\s+and\s+)(?:{_WORD}))*\b"
"""English numbers up to the thousands, as a regular expression; letter case is the caller's."""
_SPELLED = re.compile(rf"(-?)({NUMBER_WORDS})", re.IGNORECASE)

THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?(?:\\!)+|\\,)\s*(?=\d{3}(?!\d))")
"""A separator of thousands in LaTeX: ``1{,}000``, ``1\\,000``, ``1,\\!000``."""
_SPACES = re.compile(r"\\[,;:! ]|\\quad|~|\s+")
UPRIGHT = r"\\(?:text(?:rm|bf|it|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt)|operatorname|mbox|hbox)\s*"
"""Commands that set their argument upright, as a regular expression."""
_TEXT = re.compile(UPRIGHT + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_DOLLARS = re.compile(r"(?<!\\)\$")
_LAYOUT = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|small|normalsize|[lL]arge|LARGE|huge|Huge)(?![A-Za-z])\s*"
)
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|\\circ|(?<=\d)º|˚")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_OHM = re.compile(rf"(?:{UPRIGHT}\{{\s*([kMm])\s*\}}\s*)?\\Omega(?![A-Za-z])")
_MICRO = re.compile(rf"\\mu(?![A-Za-z])\s*(?:({UPRIGHT}\{{\s*)(?=[A-Za-z]+\s*\}})|(?=[A-Za-z]\s*\}}|m\b))")
_FACTOR = rf"\{{\s*({UPRIGHT}\{{[^{{}}]*\}}(?:\s*\^\s*(?:\{{-?\d\}}|\d))?)\s*\}}"
_RATIO = re.compile(rf"\\[dt]?frac\s*{_FACTOR}\s*{_FACTOR}")
_NAME = re.compile(r"(?:m\s*)?(?:\\angle|\\triangle|[∠△])?\s*[A-Za-z](?:\w|_\{\w+\}){0,4}\s*(?:=|≈|\\approx)")
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b")
_ROUNDED = re.compile(r"(?:≈|\\approx).*\Z", re.DOTALL)
_NOT_NAME = re.compile(r"^m\s*(?=\\angle|∠)|\\angle|\\triangle|[^A-Za-z0-9]")
_ENDS_IN_UNIT = re.compile(
    r"(.*(?:[\d)}\]π]|\\pi))\s*((?:°|[A-Za-z]{2,12}|(?<=\s)[a-z](?![a-z]))[^\\(){}=,;:+]*)(\^\{?[23]\}?)?"
)
_ENDS_IN_TEXT = re.compile(r"(.*(?:[\d)}\]π]|\\pi)\W*)" + _TEXT.pattern + r"\s*(\^\s*\{?\s*[23]\s*\}?)?", re.DOTALL)
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Letters of Chinese, Japanese and Korean, which have no spaces beside numbers, as a part of a regular expression."""
BEGINS = rf"(?:(?<!\w)|(?<=[{UNSPACED}]))"
"""Where a number begins, as a regular expression."""
NUMBER = re.compile(BEGINS + r"(?<!\d\.)-?(?:\d+(?:,\d{3})*(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?%?")
"""A number in a text."""
_BEHIND = re.compile(rf"\s?(?:{WIDE}|[A-Za-zµΩ°¢²³/^·%]+[23]?)(?: [A-Za-z]+){{0,3}}")
_ABOUT = re.compile(
    r"\A(?:approximately|approx\.?|about|around|roughly|大约|约|\\approx|\\sim|[≈~=])\s*", re.IGNORECASE
)
_MONEY = re.compile(r"(?:\\?\$|(?P<sign>[€£¥])|US\s*\\?\$|USD)\s*(?=[-+.\d])")
_RATE = re.compile(r"\s*(?:/|per\b|an?\b|each\b|every\b)", re.IGNORECASE)
_VALUE = re.compile(
    r"""(?P<sign>[-+]?)\s*(?:
        (?:(?P<whole>\d+)\s+)?(?P<top>-?\d+)\s*/\s*(?P<bottom>\d+)
      | (?P<digits>\d{1,3}(?:,\d{3})+|\d*)(?:\.(?P<decimals>\d*))?
        (?:[eE](?P<e>[-+]?\d{1,3})|\s*(?:\\times|\\cdot|×|x|\*)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,3})\s*\}?)?
    )(?![\d.,]*\d)""",
    re.VERBOSE,
)
_POWER_OF_TEN = re.compile(r"\A([-+]?)\s*10\s*\^")
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
    "k": 3,
    "mn": 6,
    "bn": 9,
    "万": 4,
    "亿": 8,
}
_SCALE = re.compile(
    r"\s*(?P<word>hundred|thousand|million|billion|trillion|mn\b|bn\b|万|亿)|(?P<letter>[kKMB])(?![A-ZΩa-z])"
)
_LETTERS = {"k": 3, "K": 3, "M": 6, "B": 9}
_UNIT = re.compile(r"(?:[^\W\d]|[°%'\"/$€£¥. -]|\^\s*\{?\s*[23]\s*\}?|\*\*\s*[23]|(?<=[a-z])[23]\b)*")
_NO_UNIT = re.compile(
    rf"\b(?:or|and|to|but|not|nor|plus|minus|times|over|by|pi|sqrt|root|squared|cubed|is|are|equals|than|ratio|half|dozens?"
    r"|negative|i|e|factorial|log|ln|exp|abs|mod|cos|sin|tan|maybe|perhaps|less|more|of"
    rf"|halves|quarters?|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|hundred|thousand|million)ths?"
    rf"|{_WORD}|tens|hundreds|thousands|millions|billions)\b",
    re.IGNORECASE,
)
_SAYS = re.compile(
    r"(?P<subject>(?:[A-Za-z∠△°'’-]+,?\s+){0,12}?(?:[A-Za-z∠△°’'-]+\s+|(?:it|that|there|here)(?=['’])))"
    r"(?:is|are|was|were|equals|measures|has|have|had|shows|see|count|counted|['’]s)\s+"
    r"(?:(?:equal\s+to|exactly|precisely|an?\s+total\s+of|only|just)\s+)?(?P<said>.+)",
    re.IGNORECASE | re.DOTALL,
)
_OTHERWISE = re.compile(
    rf"n['’]t\b|\b(?:not|no|never|neither|nor|none|nobody|cannot|hardly|if|whether|or|wrong|incorrect|false|doubt|pi|root"
    rf"|half|third|quarter|twice|double|triple|square|cube|power|{_WORD})\b",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\s*(?:the\s+)?(?:final\s+)?answer\s*[:=]\s*(?=\S)", re.IGNORECASE)
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=[-+.\d])", re.IGNORECASE)
_THINGS = re.compile(
    r"\b(?:[A-Za-z]{2,}s|people|children|men|women|mice|teeth|fish|sheep|deer)\b|[^\x00-\x7f]", re.IGNORECASE
)
_SIZE = re.compile(r"(?<=\w)\s+(?:long|wide|tall|high|deep|old|thick|away|apart)\Z")
_CLOSE = re.compile(r"\s*\(\s*([^()]*)\s*\)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit.

    Attributes:
        value: The number as written; a percentage is not divided by 100.
        unit: In one spelling (``mmrl_rewards.units``), or the things that are counted; "" for none.
        decimals: Digits after the point; None for an integer or a fraction.
    """

    value: Fraction
    unit: str = ""
    decimals: int | None = None


def spelled(read: Quantity) -> str:
    """One text for all ways to write a number with its unit."""
    return f"{read.value} {read.unit}".rstrip()


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity | None:
    """The one number that the text is, with its unit; None if it is anything else."""
    if len(text) > _MAX_CHARACTERS:
        return None
    text = _unit_signs(text)
    is_upright = bool(_TEXT.search(text))
    is_money = text.count("$") == 1 and text.strip().lstrip("-").startswith("$")  # two are LaTeX's
    text = _DOLLARS.sub(" " if text.count("$") > 1 else " $ ", plain(text))
    text = upright_text(THOUSANDS.sub("", text).strip(" $"))
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", _DEGREE.sub("°", text))
    text = _ABOUT.sub("", unnamed(text).strip(), count=1).replace("\\%", "%")
    money = _MONEY.search(text)
    sign = "$" if is_money else ""
    if money and text[: money.start()].strip() in ("", "-"):
        sign = money["sign"] or "$"
        text = text[: money.start()] + text[money.end() :]
    text = text.strip(" $\\")
    if spelled := _SPELLED.match(text):
        return _spelled(spelled, text[spelled.end() :])
    match = _VALUE.match(_POWER_OF_TEN.sub(r"\1 1*10^", text))
    if not match or (value := _value(match)) is None:
        return None
    rest, decimals = match.string[match.end() :], match["decimals"]
    if scale := _SCALE.match(rest):
        value *= 10 ** (_SCALES[scale["word"].casefold()] if scale["word"] else _LETTERS[scale["letter"]])
        rest, decimals = rest[scale.end() :], None
    unit = _unit(sign + rest if _RATE.match(rest) else rest, abs(value) == 1, is_upright)
    if unit is None:
        return None
    return Quantity(value, unit or known_unit(sign) or "", len(decimals) if decimals else None)


def _unit_signs(text: str) -> str:
    """The text with the signs of ohm and micro as letters, and fractions of upright units in one line."""
    if "\\" not in text:
        return text
    return _RATIO.sub(
        r" \1/\2",
        _MICRO.sub(
            lambda match: f"{match[1] or ''}µ", _OHM.sub(lambda match: f" {match[1]}Ω" if match[1] else "Ω", text)
        ),
    )


def upright_text(text: str) -> str:
    """The text with the content of commands such as ``\\text`` in their place, and spaces for LaTeX's."""
    return _TEXT.sub(r" \1 ", _SPACES.sub(" ", text))


def last_quantity(text: str) -> str | None:
    """The last number of a text, with the sign of money before it or the known unit behind it."""
    last = max(NUMBER.finditer(text), key=re.Match.start, default=None)
    if last is None:
        return None
    sign = text[last.start() - 1 : last.start()]
    if sign and sign in "$€£¥":
        return sign + last[0]
    words = _BEHIND.match(text, last.end())
    unit = next((unit for unit in _beginnings(words[0]) if known_unit(unit)), "") if words else ""
    return f"{last[0]} {unit}".rstrip()


def _beginnings(words: str) -> Iterator[str]:
    """The words, and then without the last one, as long as some are left; a preposition is no unit."""
    while words:
        if words.strip() != "in":
            yield words.strip()
        words = words.rstrip().rpartition(" ")[0]


def plain(text: str) -> str:
    """The text with full-width digits and signs, fractions and powers of Unicode as ASCII, and no sizes of letters."""
    text = _LAYOUT.sub(" ", text) if "\\" in text else text
    text = _FRACTION.sub(lambda match: f"{match[1]} {_FRACTIONS[match[2]]}", text.translate(_SIGNS))
    return _POWERS.sub(lambda match: "^{" + match[0].translate(_POWER_DIGITS) + "}", text)


def name_of(text: str) -> str:
    """The letters of the name in ``x = 5``, sorted, since an angle or side is named from either end; "" without one."""
    match = _NAME.match(plain(text))
    return "".join(sorted(_NOT_NAME.sub("", match[0]))) if match else ""


def without_unit(text: str) -> tuple[str, str]:
    """A value that need not be a number, such as ``100\\pi cm^2``, and its unit; "" where it has none."""
    text = _DEGREE.sub("°", _unit_signs(text)).strip()
    if (match := _ENDS_IN_TEXT.fullmatch(text)) and (unit := _unit(f" {match[2]}{match[3] or ''}", False, True)):
        return match[1].strip(), unit
    match = _ENDS_IN_UNIT.fullmatch(_TEXT.sub(r" \1", text))
    unit = known_unit(match[2] + (match[3] or "")) if match else None
    return (match[1].strip(), unit) if match and unit else (text, "")


def unnamed(text: str) -> str:
    """The value in ``x = 5`` or ``\\angle ABC = 2 + 3 = 5``: the text behind the last sign of equality.

    In ``x = 1/3 \\approx 0.33`` it is the exact value.
    """
    name = _NAME.match(text)
    if not name:
        return text
    before, _, value = _ROUNDED.sub("", text[name.end() :]).rpartition("=")
    return text if _SEVERAL.search(before) else value.strip()


def comparable(reference: Quantity, answer: Quantity) -> Iterator[tuple[Fraction, Fraction]]:
    """The values, reference first, that must be equal for a right answer: any of the pairs; none if units differ.

    A percent sign counts by the reference. One of 1 or less is a share: for ``0.5``, ``50%`` is right and ``0.5%``
    wrong. A larger one was asked for in per cent: for ``50``, ``50%`` is right and ``5000%`` wrong. A reference with
    the sign has told the unit: for ``50%``, ``50%``, ``50`` and ``0.5`` are right.
    """
    if (reference.unit == "%") != (answer.unit == "%"):
        if reference.unit and answer.unit:
            return
        if answer.unit:
            yield reference.value, answer.value / (100 if abs(reference.value) <= 1 else 1)
        else:
            yield reference.value, answer.value
            yield reference.value / 100, answer.value
    elif agree(reference.unit, answer.unit):
        yield reference.value, answer.value


def _value(match: re.Match[str]) -> Fraction | None:
    if max(len(part or "") for part in match.groups()) > _MAX_DIGITS:
        return None
    if match["bottom"]:
        if not int(match["bottom"]) or (match["whole"] and match["top"].startswith("-")):
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
    elif match["digits"] or match["decimals"]:
        exponent = int(match["e"] or match["power"] or 0)
        value = (
            Fraction(f"{match['digits'].replace(',', '') or '0'}.{match['decimals'] or '0'}") * Fraction(10) ** exponent
        )
    else:
        return None
    return -value if match["sign"] == "-" else value


def _spelled(match: re.Match[str], rest: str) -> Quantity | None:
    value = _in_words(match[2].casefold())
    unit = _unit(rest, value == 1)
    return None if value is None or unit is None else Quantity(Fraction(-value if match[1] else value), unit)


def _in_words(words: str) -> int | None:
    """The value of ``two hundred and twenty-one``; None for words in no order, such as ``two three``."""
    total, part, last = 0, 0, 10**6
    for word in re.findall("[a-z]+", words):
        if word in ("and", "a"):
            part = part or int(word == "a")
            continue
        value = _WORDS[word]
        if value >= 100:
            if not 0 < part < (100 if value == 100 else 1000):
                return None
            part *= value
            if value == 1000:
                total, part = total + part, 0
            last = value
        elif (0 < value < 10 and last in range(20, 100)) or (last >= 100 and (value or last == 10**6)):
            part, last = part + value, value
        else:
            return None
    return total + part


def _unit(text: str, is_one: bool, is_upright: bool = False) -> str | None:
    """The unit's one spelling, or the things in the plural; "" for none; None for other words after a number."""
    glued = text[:1].isalpha()
    text = _SIZE.sub("", (closed[1] if (closed := _CLOSE.fullmatch(text)) else text).strip(" ."))
    if not text:
        return ""
    if (known := known_unit(text, is_upright)) is not None:
        return known
    words = re.findall(r"[^\W\d]+", text)
    if not _UNIT.fullmatch(text) or glued or not 1 <= len(words) <= 5 or len(words[0]) < 2 or _NO_UNIT.search(text):
        return None
    return things(text) if is_one or _THINGS.search(text) else None


def stated(text: str) -> str:
    """The value that a sentence states: ``5 cm`` of ``The length is 5 cm.``; the text itself if it is no sentence."""
    text = _LABEL.sub("", plain(text), count=1) if len(text) <= 4 * _MAX_CHARACTERS else ""
    text = _ARTICLE.sub("", text.strip(), count=1)
    match = _SAYS.fullmatch(text)
    return text if not match or _OTHERWISE.search(match["subject"]) else _ARTICLE.sub("", match["said"], count=1)


def the_number(text: str) -> Quantity | None:
    """The number that the text is, or that a plain sentence says: ``The length is 5 cm.``, not ``It isn't 5``."""
    return quantity(text) or quantity(stated(text))
