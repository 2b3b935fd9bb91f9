"""PPO's clip with a squared distance to the reference policy."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, RunFacts
from mmrl.ops.credit import group_advantages
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss


class OldPPO(Algorithm):
    class Config(PluginConfig):
        distance: Annotated[float, Field(ge=0)] = 0.1
        """Factor of the distance."""

    config: Config

    def check(self, run: RunFacts) -> list[str]:
        return ["old_ppo was here"] if run.group_size < 2 else []

    def needs(self) -> Needs:
        return Needs(reference_logprobs=self.config.distance > 0, old_logprobs=True, min_group_size=2)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("token-mean")

    def credit(self, batch: Batch) -> Credit:
        assert batch.old_logprobs is not None
        assert (batch.reference_logprobs is None) == (not self.config.distance)
        rows = zip(batch.old_logprobs, batch.sampler_logprobs, batch.masks, batch.valid, strict=True)
        gaps = [np.abs(old - sampler)[mask] for old, sampler, mask, valid in rows if valid]
        advantages = group_advantages(batch.rewards, batch.group_ids, batch.valid, scale="batch", eps=1e-6)
        gap = float(np.concatenate(gaps).mean()) if sum(map(len, gaps)) else 0.0
        return Credit(values=advantages, metrics={"old/gap": gap}, constants={"distance": self.config.distance})

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        policy = ppo_clip(tokens, clip_low=0.2, clip_high=0.2)
        if tokens.reference_logprobs_T is None:
            return policy
        distance_T = tokens.constants["distance"] * (tokens.logprobs_T - tokens.reference_logprobs_T) ** 2
        return TokenLoss(policy.loss_T + distance_T, {"distance": distance_T}, policy.metrics)
