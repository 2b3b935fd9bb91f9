"""DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): 0 for a completion that is short enough, then less.

With ``L`` the tokens that the policy generated, the end-of-sequence token included and tool results not:

    0                                                   L <= max_tokens - cache_tokens
    ((max_tokens - cache_tokens) - L) / cache_tokens    up to L = max_tokens
    -1                                                  beyond

times ``factor``. It shapes the other rewards (``penalty``): give it the weight 1 and a place after them.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import PluginConfig, Reward, RunFacts
from mmrl.types import Rollout, Score


class Overlong(Reward):
    """A penalty on the last tokens before the limit."""

    penalty = True

    class Config(PluginConfig):
        max_tokens: int = Field(default=20480, gt=0)
        """From this length on the penalty is whole; usually ``sampler.max_new_tokens``."""
        cache_tokens: int = Field(default=4096, gt=0)
        """Tokens before ``max_tokens`` over which the penalty grows from 0."""
        factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
        """The largest penalty."""

        @model_validator(mode="after")
        def _fits(self) -> Overlong.Config:
            if self.cache_tokens > self.max_tokens:
                raise ValueError(f"cache_tokens is {self.cache_tokens}, more than max_tokens, {self.max_tokens}")
            return self

    def check(self, run: RunFacts) -> list[str]:
        limit, begin = self.config.max_tokens, self.config.max_tokens - self.config.cache_tokens
        if run.max_new_tokens <= begin:
            effect = f"is never reached: it begins after {begin} tokens"
        elif run.max_new_tokens < limit:
            effect = f"is never whole: that takes max_tokens, {limit}"
        elif run.max_new_tokens > limit:
            effect = f"no longer grows after max_tokens, {limit}"
        else:
            return []
        return [f"completions end at sampler.max_new_tokens, {run.max_new_tokens}, so the penalty {effect}"]

    def score_one(self, rollout: Rollout) -> Score:
        length = int(np.count_nonzero(rollout.mask))
        left = self.config.max_tokens - self.config.cache_tokens - length
        return float(self.config.factor * max(min(left / self.config.cache_tokens, 0.0), -1.0))
