r"""1 for a completion whose answer has the reference's mathematical value, else 0.

Accepted: the last ``\boxed{...}`` or ``<answer>...</answer>``, else (unless ``require_box``) what follows "the answer
is", else the last number, if it equals the reference or any of a list of references: ``\sqrt{884}`` for ``2 \sqrt { 221
}``, ``0.28`` for ``\frac{7}{25}``, ``48`` or ``48 cm`` for ``48^\circ``, ``x = 5`` for ``5``, ``(A)`` for ``A``; where
the row offers choices, the letter and the text of the reference's choice. Numbers are compared exactly, all else by
math-verify. References that are words of two letters or more are compared as text; math-verify reads them as products
of symbols. A rollout without a reference is unscorable.

A percent sign counts by the reference (math-verify alone takes ``50\%`` for ``0.5`` and for ``50`` and ``5000\%`` for
``50``). A reference of 1 or less is a share: for ``0.5``, ``50\%`` is right and ``0.5\%`` wrong. A larger one was asked
for in per cent: for ``50``, ``50\%`` is right and ``5000\%`` wrong. A reference with the sign has told the unit: for
``50\%``, ``50\%``, ``0.5`` and ``50`` are right. Other units may be left out, but ``48 m`` is wrong for ``48 cm``.

Rounded decimals of other references (``29.7321`` for ``2\sqrt{221}``, ``0.33`` for ``1/3``) are wrong unless
``rel_tol`` allows them, since the question must say how far to round. Six right decimals are always enough.
``rel_tol`` applies only where one of the two is written as a decimal and the other has no finite decimals: ``48.2``
stays wrong for ``48``.

Hostile answers cost little: answers longer than ``max_characters`` are wrong unread, and each comparison has
``time_limit_s`` of processor time, after which it is wrong. Only here a clock decides a reward.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache, lru_cache, partial
from types import FrameType
from typing import Any

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import candidates, last_number, reply_text
from mmrl_rewards.choice_matching import accepted_texts, chosen_text
from mmrl_rewards.quantities import Quantity, comparable, name_of, plain, quantity, spelled, without_unit
from mmrl_rewards.units import agree

_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_PERCENT = re.compile(r"\s*\\?%$")
_DEGREES = re.compile(r"(-?\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
_ROOT = re.compile(r"√\s*(?:(\d+)|([A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})")
_SYMBOLS = {"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ",
            "°": r"^\circ ", "∪": r"\cup ", "±": r"\pm ", "∠": r"\angle ", "△": r"\triangle ", "θ": r"\theta ",
            "α": r"\alpha ", "β": r"\beta "}  # fmt: skip
_EXACTLY = re.compile(r"^\s*\\approx|((?:\d|\\pi)\s*\}*)\s*(?:\\approx|≈).*$", re.DOTALL)
_PLAIN_ROOT = re.compile(r"\\sqrt\s+(\d+)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ALLOWED = """
    frac dfrac tfrac cfrac sqrt pi cdot times div pm mp left right big Big bigl bigr Bigl Bigr circ degree angle
    triangle sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp infty cup cap setminus le leq
    leqslant ge geq geqslant lt gt ne neq in notin text textbf textit textrm mathrm mathbf mathit mathbb mathcal mbox
    operatorname displaystyle textstyle large Large alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta
    iota kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega begin
    end overline vec hat bar widehat overrightarrow binom dbinom tbinom lfloor rfloor lceil rceil lvert rvert vert
    emptyset varnothing approx deg det sum int prod lim partial prime
"""
_COMMANDS = frozenset(_ALLOWED.split())
"""LaTeX that an answer may hold although its reference does not. math-verify takes a part of a text that it cannot
read."""
_GAP = r"(?:\\[;:,! ]|\\q?quad|~|\s|\\(?:text|mbox|mathrm)\s*\{\s*\}|\{\s*\}|')"
_UNREADABLE = re.compile(
    rf"\d{_GAP}+\d|(?<![_^\d])\d+\s*(?:\\left)?\s*(?:[(\[{{]\s*)+\d+\s*(?:\\right)?[)\]}}]|\d\s*_|(?:\\circ|°)\s*\}}?\s*\d"
    r"|\d\s*\|\s*\d|\.\.|//|[-=]>|[\"#@?~]|\\\\|\\&|&"
)
"""Two numbers without an operator between them (math-verify adds them, or takes one), and text without mathematics."""
_SHORT_FRACTION = re.compile(r"\\([dt]?frac)\s*(\d)\s*(\d)")
_AFTER_COMMA = re.compile(r"(?<=,)\s*\\q?quad\b|(?<=,)\\[;:, ]")
_GROUPS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))")
_ENVIRONMENT = re.compile(r"\\begin\s*\{(\w+)\}.*\\end\s*\{\1\}", re.DOTALL)
_CALL = re.compile(r"(?<=[A-Za-z])\s*(?:\\left)?\([^()]*\)|_\s*(?:\w|\{[^{}]*\})")
_BASE, _BRACES = re.compile(r"\d\s*_"), re.compile(r"\s*_\s*\{\s*(\w+)\s*\}")
_SIX = Fraction(1, 10**6)


class Math(Reward):
    """Equality in value with the reference answer."""

    class Config(PluginConfig):
        require_box: bool = False
        """True if an answer outside a box or answer tag is wrong."""
        rel_tol: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
        """Largest difference of a decimal from a reference without finite decimals, or the reverse, as a share."""
        max_characters: int = Field(default=300, gt=0)
        """Longer answers are wrong."""
        time_limit_s: float = Field(default=1.0, gt=0)
        """Processor time for comparing one answer with one reference."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = accepted_texts(rollout)
        if not accepted:
            return None
        answer = self._read(rollout)
        if answer is None:
            return 0.0
        return float(
            any(equal(reference, answer, self.config.time_limit_s, self.config.rel_tol) for reference in accepted)
        )

    def answer_of(self, rollout: Rollout) -> str | None:
        """The answer: one text for numbers of the same value; other answers are their own text."""
        answer = self._read(rollout)
        read = quantity(answer) if answer else None
        return spelled(read) if read else answer and _SPACE.sub("", answer)

    def _read(self, rollout: Rollout) -> str | None:
        """The answer; None if there is none, or it is too long."""
        texts = candidates(reply_text(rollout), last_number, require_box=self.config.require_box)
        answer = next(texts, None)
        if not answer or len(answer) > self.config.max_characters:
            return None
        return chosen_text(rollout, answer) or None


@lru_cache(maxsize=4096)
def equal(reference: str, answer: str, time_limit_s: float, rel_tol: float = 0.0) -> bool:
    """True if two bare answers have the same value. Main thread only: the time limit is a signal."""
    if _SPACE.sub("", reference) == _SPACE.sub("", answer):
        return True
    if len({name for name in (name_of(reference), name_of(answer)) if name}) > 1:
        return False
    if _WORDS.fullmatch(reference):
        return reference.casefold() == answer.casefold()
    if _BASE.search(reference):
        return _BRACES.sub(r"_\1", reference) == _BRACES.sub(r"_\1", answer)
    wanted, got = quantity(reference), quantity(answer)
    if wanted and got:
        return _same(wanted, got, rel_tol)
    if reference.count(":") != answer.count(":") and max(reference.count(":"), answer.count(":")) > 1:
        return False
    if bool(_PERCENT.search(reference)) != bool(_PERCENT.search(answer)):
        return False
    reference, answer = (plain(_EXACTLY.sub(r"\1", text)) for text in (reference, answer))
    if not _TRIGONOMETRY.search(reference + answer):
        (reference, unit), (answer, other) = without_unit(reference), without_unit(answer)
        if not agree(unit, other):
            return False
    if not _is_readable(answer, reference):
        return False
    sides = [answer] if "=" in reference else _sides(answer)
    return all(_verify(_latex(reference), _latex(side), time_limit_s, rel_tol) for side in sides)


def _is_readable(answer: str, reference: str) -> bool:
    """True if math-verify reads the answer whole; parts that the reference has too are taken to be readable."""
    if not set(_COMMAND.findall(_AFTER_COMMA.sub(" ", answer))) <= _COMMANDS.union(_COMMAND.findall(reference)):
        return False
    plain_answer = _GROUPS.sub("", _AFTER_COMMA.sub(" ", _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", answer)))
    if _ENVIRONMENT.search(plain_answer):
        plain_answer = plain_answer.replace(r"\\", ",").replace("&", ",")
    return not any(found not in reference for found in _UNREADABLE.findall(plain_answer))


def _sides(answer: str) -> list[str]:
    """The sides of an answer's equation: all of ``6+4=10``, but not the name in ``AB=6+4=10``."""
    first, *others = _CALL.sub("", answer).split("=")
    if not others:
        return [answer]
    is_name = re.search(r"∠|\\angle", first) or (
        re.search("[A-Za-z]", _COMMAND.sub(" ", first)) and not re.search(r"\d", first)
    )
    return answer.split("=")[-len(others) :] if is_name else answer.split("=")


def _same(reference: Quantity, answer: Quantity, rel_tol: float) -> bool:
    """Equality of numbers; a decimal of a fraction without finite decimals may be rounded to six, or by ``rel_tol``."""
    for wanted, got in comparable(reference, answer):
        if wanted == got:
            return True
        one_endless = _is_endless(wanted) != _is_endless(got)
        places = max(reference.decimals or 0, answer.decimals or 0)
        if one_endless and places:
            rounded = _SIX if places >= 6 else Fraction(0)
            if abs(wanted - got) <= max(rounded, Fraction(rel_tol) * abs(wanted)):
                return True
    return False


def _is_endless(value: Fraction) -> bool:
    """True if it has no finite decimals."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest != 1


def _latex(answer: str) -> str:
    """The text in dollars, which math-verify reads whole. Without them it takes ``2 \\sqrt { 221 }`` for 221."""
    answer = _ROOT.sub(lambda m: r"\sqrt{" + (m[1] or m[2] or m[3] or m[4] or "") + "}", plain(answer))
    answer = _PLAIN_ROOT.sub(r"\\sqrt{\1}", answer)
    for symbol, command in _SYMBOLS.items():
        answer = answer.replace(symbol, command)
    answer = re.sub(r"(?<![A-Za-z\\])(?:infinity|oo)\b", r"\\infty", answer)
    answer = re.sub(r"(?<![A-Za-z\\])(?:sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"(?<![A-Za-z\\])pi\b", r"\\pi", _PERCENT.sub("", answer))
    if _TRIGONOMETRY.search(answer):
        answer = _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", answer)
    return "$" + answer.replace("$", " ").replace("**", "^").replace("\\,", "").replace("\\!", "") + "$"


def _verify(reference: str, answer: str, time_limit_s: float, rel_tol: float) -> bool:
    parse, verify = _math_verify()
    try:
        with _limit(time_limit_s):
            left, right = parse(reference), parse(answer)
            if verify(left, right, timeout_seconds=None):
                return True
            return bool(rel_tol and left and right and _close(left, right, rel_tol))
    except (_OutOfTime, RecursionError, MemoryError):
        return False


def _close(reference: list[Any], answer: list[Any], rel_tol: float) -> bool:
    """True if a decimal and a real number without finite decimals differ by at most that share."""
    one, other = reference[0], answer[0]
    if not all(getattr(value, "is_number", False) and value.is_real for value in (one, other)):
        return False
    texts = [str(values[-1]).strip().strip("$").strip() for values in (reference, answer)]
    decimals = [bool(_DECIMAL.fullmatch(text.replace(",", ""))) for text in texts]
    if decimals[0] == decimals[1] or (other if decimals[0] else one).is_integer:
        return False
    return bool(abs(one.evalf() - other.evalf()) <= rel_tol * abs(one.evalf()))


@cache
def _math_verify() -> tuple[Any, Any]:
    """``parse`` and ``verify``, whose first call is too slow for a time limit; units are read here, not there."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    parse_latex = partial(
        parse, extraction_config=[LatexExtractionConfig(normalization_config=normal)], parsing_timeout=None
    )
    verify(parse_latex(r"$\frac{1}{2}$"), parse_latex("$0.5$"), timeout_seconds=None)
    return parse_latex, verify


class _OutOfTime(BaseException):
    """The time is over. It is no Exception: sympy and math-verify catch those."""


@contextmanager
def _limit(time_limit_s: float) -> Iterator[None]:
    """Raise ``_OutOfTime`` in the block once it has used that much processor time, on a busy machine too."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, time_limit_s, 0.05)  # again, if something caught the first one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
