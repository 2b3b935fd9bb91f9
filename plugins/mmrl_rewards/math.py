"""1 for a completion whose answer has the gold's mathematical value, else 0.

Accepted: the last ``\\boxed{...}`` or ``<answer>...</answer>``, else (unless ``require_box``) the last number, if it
equals the gold or any of a list of golds for math-verify: ``\\sqrt{884}`` for ``2 \\sqrt { 221 }``, ``0.28`` for
``\\frac{7}{25}``, ``48`` or ``48 cm`` for ``48^\\circ``, ``(A)`` for ``A``. A percentage equals its number with and
without the factor 100: ``50\\%`` is right for ``0.5`` and for ``50``. Rounded decimals of irrational golds are wrong.
Golds that are words of three letters or more are compared as text; math-verify reads them as products of symbols.
A rollout without a gold is unscorable.

Hostile answers cost little: longer ones than ``max_characters`` are wrong unread, and each comparison has
``time_limit_s``, after which it is wrong. This is the one place where a clock decides a reward.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import bare, final_answer, golds, last_number

_INTEGER = re.compile(r"[+-]?\d+")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")


class Math(Reward):
    """Equality in value with the gold answer."""

    class Config(PluginConfig):
        require_box: bool = False
        """Whether an answer outside a box or answer tag, its last number, is wrong."""
        max_characters: int = Field(default=300, gt=0)
        """Longer answers are wrong."""
        time_limit_s: float = Field(default=1.0, gt=0)
        """For comparing one answer with one gold."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score | None:
        accepted = golds(rollout.answer)
        if not accepted:
            return None
        answer = self._extract(rollout.text)
        if not answer or len(answer) > self.config.max_characters:
            return 0.0
        return float(any(equal(gold, answer, self.config.time_limit_s) for gold in accepted))

    def _extract(self, text: str) -> str | None:
        answer = final_answer(text)
        if answer is None and not self.config.require_box:
            answer = last_number(text)
        return None if answer is None else bare(answer)


@lru_cache(maxsize=4096)
def equal(gold: str, answer: str, time_limit_s: float) -> bool:
    """Whether two bare answers have the same value. Main thread only: the time limit is a signal."""
    if "".join(gold.split()) == "".join(answer.split()):
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return len(gold) < 4000 > len(answer) and int(gold) == int(answer)
    if _WORDS.fullmatch(gold):
        return gold.casefold() == answer.casefold()
    return _verify(_latex(gold), _latex(answer), time_limit_s)


def _latex(answer: str) -> str:
    """As math-verify reads it whole: without dollars it takes ``2 \\sqrt { 221 }`` for 221, and ``9**9`` for 9."""
    return "$" + answer.replace("$", " ").replace("**", "^") + "$"


def _verify(gold: str, answer: str, time_limit_s: float) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        with _limit(time_limit_s):
            left, right = parse(gold, parsing_timeout=None), parse(answer, parsing_timeout=None)
            return bool(verify(left, right, timeout_seconds=None))
    except (_OutOfTime, RecursionError, MemoryError):
        return False


class _OutOfTime(BaseException):
    """Not an Exception: sympy and math-verify catch those."""


@contextmanager
def _limit(time_limit_s: float) -> Iterator[None]:
    """Raise ``_OutOfTime`` in the block once the time is over."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, time_limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
