"""1 for a completion that names the right one of the offered answers, by its letter or its text, else 0.

Both the reference and the answer may be a letter (``B``, ``(B)``, ``B.``, ``option B``), a choice's text (letter case,
spaces and ``$`` do not count; numbers by value, ``45`` for ``45^\\circ``) or both (``B. 45``; wrong if they disagree).
The choices are those of the row (``rollout.choices``); without them only letters can be compared. The answer is the
content of the last box or answer tags; unless ``require_box``, what follows it after "the answer is" if it names no
choice, and without a box or tags the text after "the answer is", else all of the completion but its thinking. If such
an unmarked text is no choice by itself, the only letter of its last sentence with letters counts, provided that it is
in brackets or said to be chosen, and that nothing is denied there. A rollout without a reference, or with one that
is none of the choices, is unscorable.
"""

from __future__ import annotations

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import candidates, first_read, references, reply_text, unmarked_answer
from mmrl_rewards.choice_matching import Choices


class Choice(Reward):
    """Equality with the reference choice."""

    class Config(PluginConfig):
        require_box: bool = False
        """True if an answer outside a box or answer tags is wrong."""
        first_index: int | None = None
        """Index of the first choice, 0 or 1, for references and answers that are indices; null: integers are texts."""

    def score_one(self, rollout: Rollout) -> Score | None:
        choices, first = Choices(rollout.choices), self.config.first_index
        accepted = {choices.index(reference, first) for reference in references(rollout.answer)} - {None}
        if not accepted:
            return None
        return float(self._chosen(rollout) in accepted)

    def answer_of(self, rollout: Rollout) -> str | None:
        index = self._chosen(rollout)
        return None if index is None else str(index)

    def _chosen(self, rollout: Rollout) -> int | None:
        choices, first = Choices(rollout.choices), self.config.first_index
        text, require_box = reply_text(rollout), self.config.require_box
        index = first_read(candidates(text, require_box=require_box), lambda answer: choices.index(answer, first))
        if index is None and not require_box:
            index = choices.last_letter(unmarked_answer(text) or "")
        return index
