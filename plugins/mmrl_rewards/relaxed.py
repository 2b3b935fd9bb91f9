"""1 for an answer that is the reference text, or within 5 per cent of the reference number, else 0: for charts.

The relaxed accuracy of ChartQA (arXiv:2203.10244, section 4), after PlotQA's (arXiv:1909.00997): numbers may differ
from the reference by 5 per cent of it (``tolerance``), other answers must be equal; here without regard to letter case,
spaces and a full stop. Years are numbers there, so 2010 is right for 2015; use ``exact`` for rows where that matters.

Deviations: ``1,200``, ``$3``, ``2 million`` and ``1/2`` are read as numbers too; a percent sign counts by the
    reference, so that ``50%`` is right for ``0.5`` and for ``50``; a reference of 0 needs 0. A list of references means
    any of them. The answer is the content of the last box or answer tags, else the text after "the answer is", else all
    of the completion but its thinking. A rollout without a reference is unscorable.
"""

from __future__ import annotations

from fractions import Fraction

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import Extract, extract
from mmrl_rewards.choice_matching import accepted_texts, chosen_text
from mmrl_rewards.quantities import comparable, quantity, spelled, the_number


class Relaxed(Reward):
    """ChartQA's relaxed accuracy."""

    class Config(PluginConfig):
        tolerance: float = Field(default=0.05, ge=0, lt=1, allow_inf_nan=False)
        """Largest difference of a number, as a share of the reference."""
        extract: Extract = "auto"
        """boxed: the last box or answer tag, required; whole: the completion without its thinking; last_number: the
        last number of that; auto: as boxed where there is one, else after "the answer is", else whole."""

    def score_one(self, rollout: Rollout) -> Score | None:
        accepted = accepted_texts(rollout)
        if not accepted:
            return None
        answer = self._read(rollout)
        return float(answer is not None and any(self._equal(reference, answer) for reference in accepted))

    def answer_of(self, rollout: Rollout) -> str | None:
        answer = self._read(rollout)
        read = the_number(answer) if answer else None
        return spelled(read) if read else answer and _folded(answer)

    def _read(self, rollout: Rollout) -> str | None:
        answer = extract(rollout, self.config.extract)
        return None if answer is None else chosen_text(rollout, answer)

    def _equal(self, reference: str, answer: str) -> bool:
        if _folded(reference) == _folded(answer):
            return True
        wanted = quantity(reference)
        got = the_number(answer) if wanted else None
        allowed = Fraction(str(self.config.tolerance))
        return bool(wanted and got and any(abs(a - b) <= allowed * abs(a) for a, b in comparable(wanted, got)))


def _folded(text: str) -> str:
    return "".join(text.casefold().split())
