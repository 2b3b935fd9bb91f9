"""1 for a completion whose answer is the gold text, else 0; for digits, counts, letters, words.

Accepted: the gold, or any of a list of golds, as the answer that ``extract`` finds. Spaces around and runs of spaces
do not count, nor ``$``, ``\\text{}``, a full stop at the end, or (unless ``case_sensitive``) letter case. ``7.0`` is
not ``7``: use ``math`` for values. A rollout without a gold is unscorable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import bare, final_answer, golds, last_number

_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "auto": lambda text: text if (marked := final_answer(text)) is None else marked,
    "boxed": final_answer,
    "last_number": last_number,
    "whole": lambda text: text,
}


class Exact(Reward):
    """Text equality with the gold answer."""

    class Config(PluginConfig):
        extract: Literal["auto", "boxed", "last_number", "whole"] = "auto"
        """boxed: the last box or answer tag, required; whole: all of the completion; last_number: its last number;
        auto: as boxed where there is one, else whole."""
        case_sensitive: bool = False
        """Whether ``a`` and ``A`` are different answers."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score | None:
        accepted = {self._fold(gold) for gold in golds(rollout.answer)}
        if not accepted:
            return None
        answer = _EXTRACTORS[self.config.extract](rollout.text)
        return float(answer is not None and self._fold(bare(answer)) in accepted)

    def _fold(self, text: str) -> str:
        return text if self.config.case_sensitive else text.casefold()
