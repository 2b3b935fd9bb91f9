"""1 for a completion that has the reference answer as a word of its own, less a little for each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score


class RightAndShort(Reward):
    """The plugin that a config names ``new_plugin``."""

    class Config(PluginConfig):
        per_token: Annotated[float, Field(ge=0)] = 0.001
        """Cost of each token of the completion."""

    config: Config

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score | None:
        if rollout.answer is None:  # cannot be scored: leaves the statistics and the loss
            return None
        reference = re.escape(str(rollout.answer))
        right = re.search(rf"(?<!\w){reference}(?!\w)", rollout.text) is not None
        return float(right) - self.config.per_token * len(rollout.token_ids)
