"""How near a completion comes to the length of the reference answer, which is read where 0.2.0 had it."""

from __future__ import annotations

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score


class OldLength(Reward):
    class Config(PluginConfig):
        pass

    def score_one(self, rollout: Rollout) -> Score | None:
        if rollout.prompt.answer is None:
            return None
        return 1 / (1 + abs(len(rollout.text) - len(str(rollout.prompt.answer))))
