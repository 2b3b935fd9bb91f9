"""A penalty for saying the same again: minus the share of a completion's n-grams that stand earlier in it.

With the ``N`` runs of ``n`` words of a completion, of which ``D`` are distinct: ``D / N - 1``. It is 0 where nothing
repeats, or where there are fewer than ``n`` words, and goes to -1 for one phrase without end. Words are what white
space separates, in lower case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score


class Repetition(Reward):
    """It shapes other rewards: algorithms that normalise those add it afterwards."""

    penalty: ClassVar[bool] = True

    class Config(PluginConfig):
        n: Annotated[int, Field(ge=1)] = 3
        """Words in a run."""

    config: Config

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [self._score(rollout.text) for rollout in rollouts]

    def _score(self, text: str) -> Score:
        words = text.lower().split()
        runs = [tuple(words[start : start + self.config.n]) for start in range(len(words) - self.config.n + 1)]
        return len(set(runs)) / len(runs) - 1 if runs else 0.0
