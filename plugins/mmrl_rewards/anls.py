"""The average normalised Levenshtein similarity of an answer to the reference, 0 below one half: for documents.

ANLS of ST-VQA (arXiv:1905.13648, section 5; DocVQA and InfographicVQA use the same): with ``NL`` the Levenshtein
distance over the length of the longer text, the score is ``1 - NL`` if ``NL < threshold``, else 0; of several
references the best one counts. Letter case and spaces at the ends and in runs do not count. The mean over a dataset is
the benchmark's number.

The answer is the content of the last box or answer tags, else the text after "the answer is", else all of the
completion but its thinking. A rollout without a reference is unscorable.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import Extract, extract
from mmrl_rewards.choice_matching import accepted_texts


class ANLS(Reward):
    """Similarity of texts that forgives slips of reading."""

    class Config(PluginConfig):
        threshold: float = Field(default=0.5, gt=0, le=1)
        """From this normalised distance on the score is 0."""
        extract: Extract = "auto"
        """boxed: the last box or answer tag, required; whole: the completion without its thinking; last_number: the
        last number of that; auto: as boxed where there is one, else after "the answer is", else whole."""
        max_characters: int = Field(default=2000, gt=0)
        """Longer answers score 0."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = accepted_texts(rollout)
        if not accepted:
            return None
        answer = self.answer_of(rollout)
        if not answer or len(answer) > self.config.max_characters:
            return 0.0
        return max(self._similarity(reference.casefold(), answer) for reference in accepted)

    def answer_of(self, rollout: Rollout) -> str | None:
        answer = extract(rollout, self.config.extract)
        return None if answer is None else answer.casefold()

    def _similarity(self, reference: str, answer: str) -> float:
        longer = max(len(reference), len(answer))
        if abs(len(reference) - len(answer)) >= self.config.threshold * longer:
            return 0.0
        distance = levenshtein(reference, answer) / longer
        return 1 - distance if distance < self.config.threshold else 0.0


def levenshtein(one: str, other: str) -> int:
    """The fewest insertions, deletions and substitutions of one character that turn one text into the other."""
    columns = np.arange(len(other) + 1)
    codes = np.array([ord(character) for character in other], np.int64)
    row = columns.copy()
    for index, character in enumerate(one, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        best = np.concatenate([[index], best])
        row = np.minimum.accumulate(best - columns) + columns  # insertions: the best of all places to the left
    return int(row[-1])
