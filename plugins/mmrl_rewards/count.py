"""1 for an answer that is the reference count, else 0: ``3``, ``3.0``, ``three``, ``3 cubes``, ``twenty-one``.

Counts are whole numbers, in digits or in English words up to the thousands; ``none`` and ``no`` are 0. The answer is
the content of the last box or answer tags, else (unless ``require_box``) the text after "the answer is", also where it
follows a box with no count, else the last number or number word, always outside of thinking. A marked answer may be a
plain sentence, ``There are 3``. A rollout without a reference, or with one that is no count, is unscorable.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import candidates, first_read, reply_text
from mmrl_rewards.choice_matching import accepted_texts, chosen_text
from mmrl_rewards.quantities import BEGINS, NUMBER_WORDS, UNSPACED, Quantity, comparable, spelled, stated, the_number
from mmrl_rewards.units import is_measure

_ZERO = frozenset({"no", "none", "nothing"})
_NUMBER = re.compile(
    rf"{BEGINS}(?<!\.)-?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?![^\W{UNSPACED}])|{NUMBER_WORDS}", re.IGNORECASE
)
_NOBODY = re.compile(r"\b(?:no|any|some|every|each|this|that|which|another)[\s-]+one\b", re.IGNORECASE)
_MAX_CHARACTERS = 1000
"""Most characters of a marked answer that are read."""


class Count(Reward):
    """Equality with the reference count."""

    class Config(PluginConfig):
        require_box: bool = False
        """True if an answer outside a box or answer tags is wrong."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = [counted for reference in accepted_texts(rollout) if (counted := count(reference))]
        if not accepted:
            return None
        answer = self._counted(rollout)
        return float(answer is not None and any(a == b for one in accepted for a, b in comparable(one, answer)))

    def answer_of(self, rollout: Rollout) -> str | None:
        counted = self._counted(rollout)
        return None if counted is None else spelled(counted)

    def _counted(self, rollout: Rollout) -> Quantity | None:
        texts = candidates(reply_text(rollout), _last_count, require_box=self.config.require_box)
        return first_read((chosen_text(rollout, text) for text in texts), count)


def _last_count(text: str) -> str | None:
    numbers = _NUMBER.findall(_NOBODY.sub(" ", text))
    return numbers[-1] if numbers else None


def count(text: str) -> Quantity | None:
    """The whole number of things that the text is, or that a plain sentence says; None if there is none."""
    if len(text) > _MAX_CHARACTERS:
        return None
    if stated(text).strip(" .").casefold() in _ZERO:
        return Quantity(Fraction(0))
    read = the_number(text)
    is_count = read and read.value.denominator == 1 and read.value >= 0 and not is_measure(read.unit)
    return read if is_count else None
