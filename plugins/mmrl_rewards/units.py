"""Units in one spelling, and the words for what is counted: ``km/h``, ``kilometers per hour``, ``red apples``.

Two units are the same where one spells the other. A product or quotient of known units is known. Other words are
things: ``red apples`` and ``apples`` may be the same, since one only says less; ``apples`` and ``pears`` are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

_NAMES = {
    "°": "° deg degree degrees 度",
    "°C": "°C ℃ degc celsius centigrade 摄氏度",
    "°F": "°F ℉ degf fahrenheit 华氏度",
    "K": "kelvin kelvins",
    "%": "% percent pct percentage percents",
    "nm": "nm nanometer nanometers nanometre nanometres 纳米",
    "µm": "µm um micrometer micrometers micrometre micrometres micron microns 微米",
    "mm": "mm millimeter millimeters millimetre millimetres 毫米",
    "cm": "cm centimeter centimeters centimetre centimetres cms 厘米",
    "dm": "dm decimeter decimeters decimetre decimetres 分米",
    "m": "m meter meters metre metres 米",
    "km": "km kilometer kilometers kilometre kilometres kms 千米 公里",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "px": "px pixel pixels 像素",
    "acre": "acre acres",
    "ha": "ha hectare hectares 公顷",
    "mg": "mg milligram milligrams 毫克",
    "g": "g gram grams 克",
    "kg": "kg kilogram kilograms kgs kilo kilos 千克 公斤",
    "ton": "ton tons tonne tonnes 吨",
    "lb": "lb lbs",
    "pound": "pound pounds",
    "oz": "oz ounce ounces",
    "ms": "ms millisecond milliseconds 毫秒",
    "s": "s sec secs second seconds 秒",
    "min": "min mins minute minutes 分钟",
    "h": "h hr hrs hour hours 小时",
    "day": "day days 天",
    "week": "week weeks wk wks 周 星期",
    "month": "month months 个月",
    "year": "year years yr yrs 年",
    "decade": "decade decades",
    "century": "century centuries",
    "ml": "ml mL milliliter milliliters millilitre millilitres 毫升",
    "l": "l L liter liters litre litres 升",
    "gal": "gal gallon gallons",
    "quart": "quart quarts",
    "cup": "cup cups",
    "tsp": "tsp teaspoon teaspoons",
    "tbsp": "tbsp tablespoon tablespoons",
    "pt": "pt pint pints",
    "$": "$ dollar dollars usd",
    "cent": "cent cents ¢",
    "€": "€ euro euros eur",
    "£": "£ gbp",
    "¥": "¥",
    "yen": "yen jpy",
    "yuan": "yuan rmb cny 元",
    "rad": "rad radian radians",
    "N": "newton newtons",
    "J": "joule joules",
    "kJ": "kJ kilojoule kilojoules",
    "cal": "cal calorie calories",
    "kcal": "kcal kilocalorie kilocalories",
    "eV": "eV electronvolt electronvolts",
    "W": "watt watts",
    "kW": "kW kilowatt kilowatts",
    "kWh": "kWh",
    "V": "volt volts",
    "A": "ampere amperes amp amps",
    "Ω": "Ω ohm ohms",
    "Pa": "Pa pascal pascals",
    "kPa": "kPa kilopascal kilopascals",
    "Hz": "Hz hertz",
    "kHz": "kHz kilohertz",
    "MHz": "MHz megahertz",
    "GHz": "GHz gigahertz",
    "mol": "mol mole moles",
    "rpm": "rpm",
    "rev": "rev revs revolution revolutions",
    "T": "tesla teslas",
    "coulomb": "coulomb coulombs",
    "atm": "atm atmosphere atmospheres",
    "bar": "bar",
    "psi": "psi",
    "dB": "dB decibel decibels",
    "knot": "knot knots",
    "TB": "TB terabyte terabytes",
    "light-year": "ly light-year light-years lightyear lightyears",
    "bit": "bit bits",
    "byte": "byte bytes",
    "KB": "KB kilobyte kilobytes",
    "MB": "MB megabyte megabytes",
    "GB": "GB gigabyte gigabytes",
}
_PREFIXES = {"n": "nano", "µ": "micro", "m": "milli", "k": "kilo", "M": "mega", "G": "giga"}
_PREFIXED = {
    "N": "newton", "A": "ampere amp", "V": "volt", "W": "watt", "J": "joule", "C": "coulomb", "F": "farad",
    "T": "tesla", "g": "gram", "s": "second", "Hz": "hertz", "Pa": "pascal", "Ω": "ohm", "eV": "electronvolt", "Wh": "",
}  # fmt: skip
"""Units that take the prefixes of SI, with their names in the singular."""


def _prefixed() -> Iterator[tuple[str, str, str]]:
    """Symbol, base symbol and names of every unit with a prefix."""
    for base, words in _PREFIXED.items():
        for prefix, spoken in _PREFIXES.items():
            yield prefix + base, base, " ".join(f"{spoken}{word} {spoken}{word}s" for word in words.split())


def _may_be_variables(symbol: str, base: str) -> bool:
    """True for ``kT`` and ``mA``, which are products in a formula; ``kN`` and ``MPa`` are written as units only."""
    prefix = symbol[0]
    return prefix != "µ" and (base in "ACFTgs" or (base in "NVWJ" and prefix in "nm"))


_NAMES = {
    symbol: names if _may_be_variables(symbol, base) else f"{symbol} {names}" for symbol, base, names in _prefixed()
} | _NAMES
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_LETTERS = {letter: letter for letter in "KNJWVACFT"} | {
    symbol: symbol for symbol, base, _ in _prefixed() if _may_be_variables(symbol, base) and symbol not in _UNITS
}
"""Units that may be variables, unless they stand in an upright command or beside another unit."""
_MEANINGS = {
    "pound": {"pound", "lb", "£"},
    "¥": {"¥", "yen", "yuan"},
    "°": {"°", "°C", "°F", "C", "F"},
    "C": {"C", "°C", "°"},
    "coulomb": {"C", "coulomb"},
    "F": {"F", "°F", "°"},
}
"""Names that stand for several units."""
_COMPOUND = {"mph": "mile/hour", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s", "fps": "ft/s"}
_COUNTED = frozenset({"day", "week", "month", "year", "decade", "century", "cup", "cent", "byte", "bit", "px"})
_GENERIC = frozenset({"unit", "units", "个", "单位"})
WIDE = "|".join(sorted((name for name in _UNITS if not name[0].isascii()), key=len, reverse=True))
"""Names of units that are no ASCII, as a regular expression."""
_PARTS = re.compile(
    rf"""(?P<degrees>(?:°|\bdeg(?:ree)?s?\.?)\s*(?P<scale>[CF]\b|(?i:celsius|centigrade|fahrenheit)\b))
      | (?P<name>per\s+cent\b|light[-\s]years?\b|{WIDE})
      | (?P<per>/|每|\bper\b|\b(?:an?|each|every)\b)
      | \b(?P<square>(?i:square\b|sq\b\.?))|\b(?P<cubic>(?i:cubic|cu\b\.?))|(?P<wide>平方|立方)
      | (?:\^\s*\{{?\s*|\*\*\s*)(?P<power>-?\d)\s*\}}?|\b(?P<squared>squared|cubed)\b|(?<=[A-Za-z])(?P<glued>[23])(?!\d)
      | (?P<times>\\cdot|\\times|[·⋅*×]|(?<=[A-Za-z])-(?=[A-Za-z]))
      | (?P<word>[A-Za-z]+|[%$¢])\.?
      | [\s()]+|(?P<other>.)""",
    re.VERBOSE,
)
_WORDS = re.compile(r"[^\W\d_]+")
_UNSAID = frozenset({"the", "of", "a", "an", "total", "in", "altogether"})
_IRREGULAR = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse",
              "teeth": "tooth", "geese": "goose", "dice": "die"}  # fmt: skip
_MAX_CHARACTERS = 60


@lru_cache(maxsize=4096)
def known_unit(text: str, is_upright: bool = False) -> str | None:
    """The one spelling of a known unit, such as ``h^-1 km``; "" for units in general, None for other words.

    Args:
        is_upright: True if the text stood in a command such as ``\\text``, where a capital letter is no variable.
    """
    text = text.strip(" .")
    if text in _GENERIC:
        return ""
    if unit := _named(text):
        return unit
    if not text or len(text) > _MAX_CHARACTERS:
        return None
    powers = _powers(_COMPOUND.get(text, text), is_upright)
    if powers is None:
        return None
    return " ".join(f"{name}^{power}".removesuffix("^1") for name, power in sorted(powers.items())).strip()


def _powers(text: str, is_upright: bool) -> dict[str, int] | None:
    """The factors of a unit and their powers; None if one is unknown."""
    powers = dict[str, int]()
    sign, ahead, last, is_joined = 1, 1, "", is_upright
    for part in _PARTS.finditer(text):
        if part["other"]:
            return None
        if part["per"]:
            if part["per"] == "/" and not powers:
                return None
            sign, is_joined = -1, True
        elif part["square"] or part["cubic"] or part["wide"]:
            ahead, is_joined = 3 if part["cubic"] or part["wide"] == "立方" else 2, True
        elif power := part["power"] or part["glued"] or part["squared"]:
            if not powers:
                return None
            powers[last] *= {"squared": 2, "cubed": 3}.get(power) or int(power)
            is_joined = True
        elif part["times"]:
            if not powers:
                return None
            is_joined = True
        elif name := part["degrees"] or part["name"] or part["word"]:
            unit = "°" + part["scale"][0].upper() if part["degrees"] else _factor(name)
            if unit is None:
                return None
            powers[unit] = powers.get(unit, 0) + sign * ahead
            last, ahead = unit, 1
            is_joined = is_joined or (len(name) > 1 and name not in _LETTERS)
    return powers if powers and is_joined else None


def _factor(name: str) -> str | None:
    if name in _GENERIC:
        return ""
    return _named("".join(name.split())) or _LETTERS.get(name)


def things(text: str) -> str:
    """The words for things that are counted, in the singular and sorted: ``apple red`` of ``red apples``."""
    words = (word for word in _WORDS.findall(text) if word.casefold() not in _UNSAID and word not in _GENERIC)
    return " ".join(sorted({_named(word) or _stem(word) for word in words}))


def agree(one: str, other: str) -> bool:
    """True unless both name a unit or things, and they differ; ``apples`` only says less than ``red apples``.

    Args:
        one: The result of ``known_unit`` or ``things``; "" for no unit.
    """
    if not one or not other or one == other:
        return True
    ours, theirs = one.split(), other.split()
    if len(ours) == len(theirs) and all(map(_is_same, ours, theirs)):
        return True
    if any(name in _NAMES for name in _names(one) | _names(other)):
        return False
    is_rate = "per" in ours, "per" in theirs
    return is_rate[0] == is_rate[1] and (set(ours) <= set(theirs) or set(theirs) <= set(ours))


def is_measure(unit: str) -> bool:
    """True if some of the unit is measured, as ``cm`` and ``word min^-1`` are, and not counted, as days are."""
    return any(name in _NAMES and name not in _COUNTED for name in _names(unit))


def _names(unit: str) -> set[str]:
    return {part.split("^")[0] for part in unit.split()}


def _is_same(one: str, other: str) -> bool:
    """True if two factors may be one: ``^2`` is a square unit of any name."""
    (name, power), (named, powered) = (part.partition("^")[::2] for part in (one, other))
    meanings = _MEANINGS.get(name, {name}) & _MEANINGS.get(named, {named})
    return power == powered and bool(meanings or not name or not named)


def _named(text: str) -> str | None:
    return _UNITS.get(text) or _UNITS.get(text.casefold())


def _stem(word: str) -> str:
    """One text for a noun's singular and plural; no word itself: ``berri`` for ``berries`` and ``berry``."""
    word = _IRREGULAR.get(word.casefold(), word.casefold())
    if word.endswith("es"):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    word = word.removesuffix("e")
    return word[:-1] + {"y": "i", "v": "f"}.get(word[-1:], word[-1:])
