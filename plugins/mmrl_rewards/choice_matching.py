"""The answers that a question offers: their letters and texts are the same answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.types import Rollout
from mmrl_rewards.answers import bare, golds
from mmrl_rewards.quantities import comparable, plain, quantity

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WORD = r"(?:the\s+)?(?:option|choice|answer|letter|选项|选|答案)\s*(?:is|是|为)?[\s:]*"
_OPENING, _CLOSING = r"\\?[(\[{<]\s*", r"\s*\\?[)\]}>]"
_LETTER = re.compile(
    rf"(?:{_WORD})?(?:{_OPENING}(?P<closed>[A-Za-z]){_CLOSING}|(?P<open>[A-Za-z])(?=\s*[.):,、]|\s*$))"
    r"[\s.):,、]*(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OWN_LETTER = re.compile(r"\s*[(\[]?([A-Za-z])[.):\]、]\s*(?=\S)")
_LAST = re.compile(rf"{_OPENING}([A-Z]){_CLOSING}|(?<![\w'])([A-Z])(?=[\s.*$]*\Z)")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_MAX_CHARACTERS = 2000
"""Longer answers name no choice."""
_TAIL = 200
"""Characters at a completion's end in which a letter alone is looked for."""


class Choices:
    """The texts of a question's choices, in the order of their letters; empty where only letters are known.

    A text that is itself a letter of another choice is meant where it is given: texts come before letters.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        own = [_OWN_LETTER.match(text) for text in texts]
        lettered = len(texts) > 1 and all(m and m[1].upper() == _LETTERS[i % 26] for i, m in enumerate(own))
        self.texts = tuple(text[m.end() :] if m and lettered else text for m, text in zip(own, texts, strict=True))
        self._folded = [_fold(text) for text in self.texts]
        self._quantities = [quantity(bare(text)) for text in self.texts]

    def index(self, answer: str, first_index: int | None = None) -> int | None:
        """Which choice an answer names, by text, by letter, or by both if they agree; None if none or several.

        Args:
            answer: As bare text: ``45``, ``B``, ``(B)``, ``B. 45``, ``option B``, ``\\text{(B)}``.
            first_index: What an integer that is no choice's text counts from; None if integers are no indices.
        """
        if len(answer) > _MAX_CHARACTERS:
            return None
        answer = bare(_COMMAND.sub(r"\1", plain(answer)))
        if (index := self._by_text(answer)) is not None:
            return index
        if first_index is not None and re.fullmatch(r"\d{1,2}", answer):
            return self._within(int(answer) - first_index)
        match = _LETTER.fullmatch(answer)
        if not match:
            return None
        index = self._within(_LETTERS.index((match["closed"] or match["open"]).upper()))
        said = self._by_text(match["rest"]) if match["rest"] else None
        return index if said is None or said == index else None

    def last_letter(self, text: str) -> int | None:
        """The choice whose letter is the last in brackets, ``(B)``, or stands at the end of the text."""
        letters = _LAST.findall(text[-_TAIL:])
        return self._within(_LETTERS.index("".join(letters[-1]))) if letters else None

    def alike(self, gold: str) -> list[str]:
        """The gold, and the letter and text of the choice that it names."""
        index = self.index(gold)
        return [gold] if index is None or not self.texts else [gold, _LETTERS[index], bare(self.texts[index])]

    def _by_text(self, answer: str) -> int | None:
        folded = _fold(answer)
        same = [index for index, text in enumerate(self._folded) if text == folded]
        if not same and (value := quantity(answer)) is not None:
            pairs = enumerate(self._quantities)
            same = [i for i, q in pairs if q is not None and any(a == b for a, b in comparable(q, value))]
        return same[0] if len(same) == 1 else None

    def _within(self, index: int) -> int | None:
        return index if 0 <= index < (len(self.texts) or 26) else None


def _fold(text: str) -> str:
    return "".join(bare(_COMMAND.sub(r"\1", plain(text))).casefold().split())


def accepted_texts(rollout: Rollout) -> list[str]:
    """Every text that is a right answer to the rollout's question; empty without a gold.

    Where the row offers choices, a gold that names one stands for its letter and its text.
    """
    accepted = golds(rollout.answer)
    if not rollout.choices:
        return accepted
    choices = Choices(rollout.choices)
    return list(dict.fromkeys(text for gold in accepted for text in choices.alike(gold)))


def chosen_text(rollout: Rollout, answer: str) -> str:
    """The text of the choice whose letter the answer is; the answer itself if it is none, or there are no choices."""
    choices = Choices(rollout.choices)
    index = choices.index(answer) if rollout.choices else None
    return answer if index is None else choices.texts[index]
