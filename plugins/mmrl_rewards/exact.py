"""1 for a completion whose answer is the reference text, else 0; for digits, counts, letters, words.

Accepted: the reference, or any of a list of references, as the answer that ``extract`` finds. If the row offers
choices, the letter and the text of the reference's choice count too. Spaces around and runs of spaces do not count, nor
``$``, ``\\text{}``, a full stop at the end, or (unless ``case_sensitive``) letter case. ``7.0`` is not ``7``: use
``numeric`` or ``math`` for values. A rollout without a reference is unscorable.
"""

from __future__ import annotations

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import Extract, extract
from mmrl_rewards.choice_matching import accepted_texts, chosen_text


class Exact(Reward):
    """Text equality with the reference answer."""

    class Config(PluginConfig):
        extract: Extract = "auto"
        """boxed: the last box or answer tag, required; whole: the completion without its thinking; last_number: the
        last number of that; auto: as boxed where there is one, else after "the answer is", else whole."""
        case_sensitive: bool = False
        """True if ``a`` and ``A`` are different answers."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = {self._fold(reference) for reference in accepted_texts(rollout)}
        if not accepted:
            return None
        return float(self.answer_of(rollout) in accepted)

    def answer_of(self, rollout: Rollout) -> str | None:
        answer = extract(rollout, self.config.extract)
        return None if answer is None else self._fold(chosen_text(rollout, answer))

    def _fold(self, text: str) -> str:
        return text if self.config.case_sensitive else text.casefold()
