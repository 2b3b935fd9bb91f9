"""Lite-PPO: critic-free PPO with two techniques (arXiv:2508.08221).

For each prompt, ``G`` completions with rewards ``R_1..R_G``; ``std`` is over the rewards of the whole batch:

    A_i  = (R_i - mean(R of the prompt)) / (std(R of the batch) + eps)
    rho  = pi(y_t) / pi_old(y_t)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))
    L    = 1/N sum_i sum_t L_it,  N tokens in the batch

Deviations from the paper, and why:

- ``std`` is the sample's (the paper does not say).
- A group of equal rewards, or of one, has advantage exactly 0.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.ops.credit import group_advantages
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss


class LitePPO(Algorithm):
    class Config(PluginConfig):
        clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """The ratio is clipped below ``1 - clip_low``."""
        clip_high: Annotated[float, Field(gt=0)] = 0.2
        """The ratio is clipped above ``1 + clip_high``."""
        std_eps: Annotated[float, Field(ge=0)] = 1e-6
        """Added to the batch's standard deviation."""

    config: Config

    def needs(self) -> Needs:
        return Needs(min_group_size=2)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("token-mean")

    def credit(self, batch: Batch) -> Credit:
        advantages_B = group_advantages(
            batch.rewards, batch.group_ids, batch.valid, scale="batch", eps=self.config.std_eps
        )
        return Credit(advantages_B)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip  # imports torch

        return ppo_clip(tokens, clip_low=self.config.clip_low, clip_high=self.config.clip_high)
