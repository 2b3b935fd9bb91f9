"""1 for a completion whose answer is the gold count, else 0: ``3``, ``3.0``, ``three``, ``3 cubes``, ``twenty-one``.

Counts are whole numbers, in digits or in English words up to the thousands; ``none`` and ``no`` are 0. The answer is
what is in the last box or answer tags, else what follows "the answer is", else (unless ``require_box``) the last
number or number word of the completion. A marked answer may be a sentence if it has exactly one number. A rollout
without a gold, or with one that is no count, is unscorable.
"""

from __future__ import annotations

import re

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import bare, final_answer, said_answer
from mmrl_rewards.choices import accepted_texts, chosen_text
from mmrl_rewards.quantities import plain, quantity

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
_ZERO = frozenset({"no", "none", "nothing"})
_WORD = "|".join(sorted(_WORDS, key=len, reverse=True))
_NUMBER = re.compile(
    rf"(?<![\w.])-?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?![\w])"
    rf"|\b(?:a\s+(?=hundred|thousand))?(?:{_WORD})(?:(?:\s+|-|\s+and\s+)(?:{_WORD}))*\b",
    re.IGNORECASE,
)
_MAX_CHARACTERS = 1000
"""Of a marked answer that is read."""


class Count(Reward):
    """Equality with the gold count."""

    class Config(PluginConfig):
        require_box: bool = False
        """Whether an answer outside a box or answer tags is wrong."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = {count(gold) for gold in accepted_texts(rollout)} - {None}
        if not accepted:
            return None
        marked = final_answer(rollout.text)
        if marked is None and not self.config.require_box:
            marked = said_answer(rollout.text)
            if not marked:
                numbers = _NUMBER.findall(rollout.text)
                marked = numbers[-1] if numbers else None
        return float(marked is not None and count(chosen_text(rollout, bare(marked))) in accepted)


def count(text: str) -> int | None:
    """The whole number that the text is, or the only number of a sentence; None if there is none, or several."""
    if len(text) > _MAX_CHARACTERS:
        return None
    if (read := quantity(text)) is not None:
        return int(read.value) if read.value.denominator == 1 and read.value >= 0 and not read.unit else None
    text = plain(text).casefold()
    numbers = _NUMBER.findall(text)
    if not numbers:
        return 0 if text.strip(" .") in _ZERO else None
    if len(numbers) > 1 or re.search(r"[\\^*/=+]|\b(?:or|minus|plus|times|not|dozen)\b", text):
        return None
    found = quantity(numbers[0])
    if found is None:
        return _in_words(numbers[0])
    return int(found.value) if found.value.denominator == 1 and found.value >= 0 else None


def _in_words(words: str) -> int | None:
    """The value of ``two hundred and twenty-one``; None for words in no order, such as ``two three``."""
    total, part, last = 0, 0, 10**6
    for word in re.findall("[a-z]+", words):
        if word in ("and", "a"):
            part = part or int(word == "a")
            continue
        value = _WORDS[word]
        if value >= 100:
            if not 0 < part < 100 and not (value == 1000 and 0 < part < 1000):
                return None
            part *= value
            if value == 1000:
                total, part = total + part, 0
            last = value
        elif (value < 10 and last in range(20, 100)) or last >= 100:
            part, last = part + value, value
        else:
            return None
    return total + part
