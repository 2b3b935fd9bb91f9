"""The answers that a question offers; a choice's letter and its text are the same answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.types import Rollout
from mmrl_rewards.answers import bare, references
from mmrl_rewards.quantities import comparable, plain, quantity

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WORD = r"(?:the\s+)?(?:option|choice|answer|letter|选项|选|答案)\s*(?:is|是|为)?[\s:]*"
_OPENING, _CLOSING = r"\\?[(\[{<]\s*", r"\s*\\?[)\]}>]"
_LETTER = re.compile(
    rf"(?:{_WORD})?(?:{_OPENING}(?P<closed>[A-Za-z]){_CLOSING}|(?P<open>[A-Za-z](?=\s*[.):,、]|\s*$)|(?-i:[A-Z])(?=\s*\()))"
    r"[\s.):,、]*(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OWN_LETTER = re.compile(r"\s*[(\[]?([A-Za-z])[.):\]、]\s*(?=\S)")
_ALONE = re.compile(r"(?<![\w'\\])(?![AI]\s+[a-z])[A-Z](?![\w'])")
_LOWER = re.compile(r"(?<![\w'\\])(?!a\s+[a-z])[a-z](?![\w'])")
"""A letter that is no article, nor "I"."""
_SENTENCES = re.compile(r"[.!?;]\s+|[。；\n]+\s*")
_CHOSEN = re.compile(
    rf"{_OPENING}(?P<closed>[A-Z]){_CLOSING}"
    r"|(?:\b(?:is|be|are|choose|chose|pick|select|selected|option|choice|answer|letter)|[:=]|选项?|为|是|\A)"
    r"[\s:*]*(?P<open>[A-Z])(?=[\s.*$]*\Z)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"n't\b|\b(?:not|nor|neither|never|no|none|cannot|except|excluded?|eliminated?|incorrect|wrong|false)\b|不|非",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_VERDICT = re.compile(
    rf"\s*(?=(?:is|was|are|can|could|must|seems?|looks|does)(?:n't|not)?\b).*(?:{_DENIED.pattern})",
    re.IGNORECASE | re.DOTALL,
)
"""A denial of the letter that stands before it."""
_MAX_CHARACTERS = 2000
"""Longer answers name no choice."""
_TAIL = 200
"""Characters at a completion's end in which a letter alone is looked for."""


class Choices:
    """The texts of a question's choices, in the order of their letters; empty where only letters are known.

    Texts come before letters: an answer that is one choice's text and another one's letter means the text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        own = [_OWN_LETTER.match(text) for text in texts]
        lettered = len(texts) > 1 and all(m and m[1].upper() == _LETTERS[i % 26] for i, m in enumerate(own))
        self.texts = tuple(text[m.end() :] if m and lettered else text for m, text in zip(own, texts, strict=True))
        self._folded = [_fold(text) for text in self.texts]
        self._quantities = [quantity(bare(text)) for text in self.texts]

    def index(self, answer: str, first_index: int | None = None) -> int | None:
        """Index of the choice that an answer names, by text, letter, or both if they agree; None if none or several.

        Args:
            answer: As bare text: ``45``, ``B``, ``(B)``, ``B. 45``, ``option B``, ``\\text{(B)}``.
            first_index: Index of the first choice, for an integer that is no choice's text; None if integers are no
                indices.
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
        if index is None or not match["rest"]:
            return index
        said = self._by_text(match["rest"])
        if said is None:
            is_denied = _VERDICT.match(match["rest"])
            return None if is_denied or self._names_another(index, match["rest"], answer) else index
        return index if said == index else None

    def contradicts_itself(self, answer: str) -> bool:
        """True if an answer begins with a choice's letter and goes on with another choice."""
        match = _LETTER.fullmatch(bare(_COMMAND.sub(r"\1", plain(answer)))) if len(answer) <= _MAX_CHARACTERS else None
        begins = match and self._within(_LETTERS.index((match["closed"] or match["open"]).upper())) is not None
        return bool(begins and self.index(answer) is None)

    def last_letter(self, text: str) -> int | None:
        """The choice whose letter is the only one in the last sentence with letters, in brackets or said to be chosen.

        ``So it is (B).`` and ``I pick B``, but neither ``not (B)`` nor ``(A) or (B)`` nor ``vitamin B``.
        """
        for sentence in reversed(_SENTENCES.split(text[-_TAIL:].strip())):
            letters = {
                letter for letter in _ALONE.findall(sentence) if self._within(_LETTERS.index(letter)) is not None
            }
            if letters:
                chosen = {(m["closed"] or m["open"]) for m in _CHOSEN.finditer(sentence)}
                one = len(letters) == 1 and letters <= chosen and not _DENIED.search(sentence)
                return _LETTERS.index(letters.pop()) if one else None
        return None

    def alike(self, reference: str) -> list[str]:
        """The reference, and the letter and text of the choice that it names; no letter that is another's text."""
        index = self.index(reference)
        if index is None or not self.texts:
            return [reference]
        letter = [_LETTERS[index]] if self.index(_LETTERS[index]) == index else []
        return [reference, *letter, bare(self.texts[index])]

    def _names_another(self, index: int, rest: str, answer: str) -> bool:
        """True if the text after a choice's letter has the letter or text of another one."""
        is_lower = answer.lstrip("([{<\\ ")[:1].islower()
        letters = _ALONE.findall(rest) + (_LOWER.findall(rest) if is_lower else [])
        if any(self._within(_LETTERS.index(letter.upper())) not in (None, index) for letter in letters):
            return True
        others = [bare(plain(text)).casefold() for text in self.texts]
        rest = rest.casefold()
        if self.texts and others[index]:
            rest = rest.replace(others.pop(index), " ")
        return any(text and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", rest) for text in others)

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
    """Every text that is a right answer to the rollout's question; empty without a reference.

    If the row offers choices, a reference that names one stands for its letter and its text.
    """
    accepted = references(rollout.answer)
    if not rollout.choices:
        return accepted
    choices = Choices(rollout.choices)
    return list(dict.fromkeys(text for reference in accepted for text in choices.alike(reference)))


def chosen_text(rollout: Rollout, answer: str) -> str:
    """The text of the choice that the answer names; the answer itself if it names none, or there are no choices.

    "" if the answer has one choice's letter and another one's text.
    """
    if not rollout.choices:
        return answer
    choices = Choices(rollout.choices)
    if (index := choices.index(answer)) is not None:
        return bare(choices.texts[index])
    return "" if choices.contradicts_itself(answer) else answer
