"""Values compared by math-verify: what it may read, in a form that it reads whole, in bounded time."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any

from mmrl_rewards.quantities import plain

_DECIMAL = re.compile(r"-?\d*\.\d+")
PERCENT = re.compile(r"\s*\\?%$")
_DEGREES = re.compile(r"(-?\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
_ROOT = re.compile(r"√\s*(?:(\d+)|([A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})")
_SYMBOLS = {"π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ",
            "°": r"^\circ ", "∪": r"\cup ", "±": r"\pm ", "∠": r"\angle ", "△": r"\triangle ", "θ": r"\theta ",
            "α": r"\alpha ", "β": r"\beta "}  # fmt: skip
EXACTLY = re.compile(r"^\s*\\approx|((?:\d|\\pi)\s*\}*)\s*(?:\\approx|≈).*$", re.DOTALL)
_IMAGINARY = re.compile(r"\\(?:mathrm|text)\s*\{\s*i\s*\}|(?<![A-Za-z\\])([a-oq-z]?)i(?![A-Za-z])")
_NOT_IMAGINARY = re.compile(r"i\s*\}?\s*[\^_=]|_\s*\{?\s*i|\\(?:sum|prod|int)(?![A-Za-z])|(?<!\\)I")
"""An ``i`` that may be an index or a variable, and a power of it, which math-verify misreads."""
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
_SHORT_FRACTION = re.compile(r"\\(frac)\s*(\d)\s*(\d)")
_ENVIRONMENT = re.compile(r"\\begin\s*\{(\w+)\}.*\\end\s*\{\1\}", re.DOTALL)


def is_readable(answer: str, reference: str) -> bool:
    """True if math-verify reads the answer whole; parts that the reference has too are taken to be readable."""
    if not set(_COMMAND.findall(answer)) <= _COMMANDS.union(_COMMAND.findall(reference)):
        return False
    plain_answer = _SHORT_FRACTION.sub(r"\\\1{\2}{\3}", answer)
    if _ENVIRONMENT.search(plain_answer):
        plain_answer = plain_answer.replace(r"\\", ",").replace("&", ",")
    return not any(found not in reference for found in _UNREADABLE.findall(plain_answer))


def _latex(answer: str) -> str:
    """The text in dollars, which math-verify reads whole. Without them it takes ``2 \\sqrt { 221 }`` for 221."""
    answer = _ROOT.sub(lambda m: r"\sqrt{" + (m[1] or m[2] or m[3] or m[4] or "") + "}", plain(answer))
    answer = _PLAIN_ROOT.sub(r"\\sqrt{\1}", answer)
    for symbol, command in _SYMBOLS.items():
        answer = answer.replace(symbol, command)
    answer = re.sub(r"(?<![A-Za-z\\])(?:infinity|oo)\b", r"\\infty", answer)
    answer = re.sub(r"(?<![A-Za-z\\])(?:sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"(?<![A-Za-z\\])pi\b", r"\\pi", PERCENT.sub("", answer))
    if TRIGONOMETRY.search(answer):
        answer = _DEGREES.sub(r"\\left(\\frac{\1 \\pi}{180}\\right)", answer)
    return "$" + answer.replace("$", " ").replace("**", "^").replace("\\,", "").replace("\\!", "") + "$"


def same_value(reference: str, answer: str, rel_tol: float) -> bool:
    """True if math-verify finds two values equal, or they are as close as ``rel_tol`` allows; see ``limit``."""
    parse, verify = math_verify()
    if not _NOT_IMAGINARY.search(f"{reference} {answer}"):
        reference, answer = (_IMAGINARY.sub(r"\1 I", text) for text in (reference, answer))
    left, right = parse(_latex(reference)), parse(_latex(answer))
    if verify(left, right, timeout_seconds=None):
        return True
    return bool(rel_tol and left and right and _close(left, right, rel_tol))


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
def math_verify() -> tuple[Any, Any]:
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


class OutOfTime(BaseException):
    """The time is over. It is no Exception: sympy and math-verify catch those."""


@contextmanager
def limit(time_limit_s: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in the block once it has used that much processor time, on a busy machine too."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, time_limit_s, 0.05)  # again, if something caught the first one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
