r"""1 for a completion whose answer has the reference's mathematical value, else 0.

Accepted: the answer that ``mmrl_rewards.answers`` finds; where none is marked or said, the formula that ends the text
(``mmrl_rewards.formulas``), or the number, if one follows; if it equals the reference or any of a list of references:
``\sqrt{884}`` for ``2 \sqrt { 221 }``, ``0.28`` for ``\frac{7}{25}``, ``48`` or ``48 cm`` for ``48^\circ``, ``x = 5``
for ``5``, ``x_1 = 2, x_2 = 3`` for ``3, 2``, ``x \in [2, \infty)`` for ``x \ge 2``, ``(A)`` for ``A``; where the row
offers choices, the letter and the text of the reference's choice. Numbers are compared exactly, lists, points,
intervals and matrices part by part (``mmrl_rewards.structures``), all else by math-verify. References that are words of
two letters or more are compared as text; math-verify reads them as products of symbols. A rollout without a reference,
or with one that is broken off or blank (``\frac{1``, ``$$``), is unscorable.

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

import re
from fractions import Fraction
from functools import lru_cache

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards import structures, symbolic
from mmrl_rewards.answers import bare, candidates, first_read, reply_text
from mmrl_rewards.choice_matching import accepted_texts, chosen_text
from mmrl_rewards.clock import same_date, same_time
from mmrl_rewards.formulas import formulas, is_name, is_readable, last_value, unescaped, written
from mmrl_rewards.quantities import (
    Quantity,
    comparable,
    name_of,
    plain,
    quantity,
    spelled,
    stated,
    upright_text,
    without_unit,
)
from mmrl_rewards.units import agree

_PLAIN = re.compile(r"-?\d{1,60}(?:\.\d{1,60})?")
"""The most frequent references and answers, which need no reading."""
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")
_CALL = re.compile(r"(?<=[A-Za-z])\s*\([^()]*\)|_\s*(?:\w|\{[^{}]*\})")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BASE, _BRACES = re.compile(r"\d\s*_"), re.compile(r"\s*_\s*\{\s*(\w+)\s*\}")
_FEET = re.compile(r"\d\s*(?:['′]|\^\s*\{?\s*\\prime\s*\}?)\s*\d")
"""Feet and inches, or minutes and seconds, which math-verify would read as one number."""
_PRIME = re.compile(r"['′]|\\prime(?![A-Za-z])")
_MAX_SENTENCE = 300
"""Longer texts are not read as sentences."""
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
        accepted = [text for reference in accepted_texts(rollout) if (text := _reference(reference))]
        if not accepted:
            return None
        answer = self._read(rollout)
        if answer is None:
            return 0.0
        return float(
            any(equal(reference, answer, self.config.time_limit_s, self.config.rel_tol) for reference in accepted)
        )

    def answer_of(self, rollout: Rollout) -> str | None:
        """The answer: one text for numbers of the same value and, if references have one, name; else its own text."""
        answer = self._read(rollout)
        read = quantity(answer) if answer else None
        if not answer or not read:
            return answer and _SPACE.sub("", answer)
        name = name_of(answer)
        others = {name_of(text) for reference in accepted_texts(rollout) if (text := _reference(reference))}
        is_another = name and "" not in others and name not in others
        return f"{name} = {spelled(read)}" if is_another else spelled(read)

    def _read(self, rollout: Rollout) -> str | None:
        """The answer; None if there is none, or it is too long."""
        texts = candidates(reply_text(rollout), last_value, require_box=self.config.require_box)
        return first_read((chosen_text(rollout, text) for text in texts), self._answer)

    def _answer(self, text: str) -> str | None:
        """The answer that a text states, if it can be read."""
        if _PLAIN.fullmatch(text):
            return text
        if len(text) > self.config.max_characters:
            return None
        answer = bare(_stated(text))
        return answer if is_readable(answer) else None


def _stated(text: str) -> str:
    """The value that a sentence states, ``$7$`` in ``The value of $x$ is $7$``; the text itself if it is none."""
    if " " not in text or len(text) > _MAX_SENTENCE:
        return text
    plain_names = text
    for formula in reversed(list(formulas(text))):
        if is_name(formula.text):
            plain_names = plain_names[: formula.begin] + "it" + plain_names[formula.end :]
    return said if (said := stated(plain_names)) != plain(plain_names) else text


@lru_cache(maxsize=4096)
def _reference(text: str) -> str | None:
    """A reference as LaTeX: in a text with formulas the one that it ends in; None if it cannot be read."""
    if _PLAIN.fullmatch(text):
        return text
    text = unescaped(text)
    if next(formulas(text), None) and not quantity(text):
        text = bare(last_value(text) or text)
    return text if is_readable(text) else None


@lru_cache(maxsize=4096)
def equal(reference: str, answer: str, time_limit_s: float, rel_tol: float = 0.0) -> bool:
    """True if two bare answers have the same value. Main thread only: the time limit is a signal."""
    if _flat(reference) == _flat(answer):
        return True
    if _PLAIN.fullmatch(reference) and _PLAIN.fullmatch(answer):
        return Fraction(reference) == Fraction(answer)
    if _WORDS.fullmatch(reference):
        return reference.casefold() == answer.casefold()
    wanted, got = quantity(reference), quantity(answer)
    if wanted and got:
        names = {name for name in (name_of(reference), name_of(answer)) if name}
        return len(names) < 2 and _same(wanted, got, rel_tol)
    for same in (same_date, same_time):
        if (is_same := same(reference, answer)) is not None:
            return is_same
    if _FEET.search(reference) or _FEET.search(answer):
        return False
    symbolic.math_verify()  # is loaded outside of the time limit
    try:
        with symbolic.limit(time_limit_s):
            return structures.same(written(reference), written(answer), lambda a, b: _equal_values(a, b, rel_tol))
    except (symbolic.OutOfTime, RecursionError, MemoryError):
        return False


def _flat(text: str) -> str:
    """The text without blanks and upright commands."""
    return _SPACE.sub("", " ".join(upright_text(text).split()) if "\\" in text else text)


def _equal_values(reference: str, answer: str, rel_tol: float) -> bool:
    """True if two values without parts are equal; in the spelling of ``written``."""
    reference, answer = bare(reference), bare(answer)
    if _SPACE.sub("", reference) == _SPACE.sub("", answer):
        return True
    if _WORDS.fullmatch(reference):
        return reference.casefold() == answer.casefold()
    if _BASE.search(reference):
        return _BRACES.sub(r"_\1", reference) == _BRACES.sub(r"_\1", answer)
    wanted, got = quantity(reference), quantity(answer)
    if wanted and got:
        return _same(wanted, got, rel_tol)
    if reference.count(":") != answer.count(":") and max(reference.count(":"), answer.count(":")) > 1:
        return False
    if bool(symbolic.PERCENT.search(reference)) != bool(symbolic.PERCENT.search(answer)):
        return False
    if len(_PRIME.findall(reference)) != len(_PRIME.findall(answer)):
        return False
    reference, answer = (symbolic.EXACTLY.sub(r"\1", text) for text in (reference, answer))
    if not symbolic.TRIGONOMETRY.search(reference + answer):
        (reference, unit), (answer, other) = without_unit(reference), without_unit(answer)
        if not agree(unit, other):
            return False
    if not symbolic.is_readable(answer, reference):
        return False
    sides = [answer] if "=" in reference else _sides(answer)
    return all(symbolic.same_value(reference, side, rel_tol) for side in sides)


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
