"""Policy gradient with the mean reward of a prompt's completions as baseline.

A_i  = R_i - mean(R of the prompt)
L_it = -A_i log pi(y_it)
"""

from __future__ import annotations

from typing import Literal

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.ops.credit import group_advantages
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss


class MeanBaseline(Algorithm):
    """The plugin that a config names ``new_plugin``."""

    class Config(PluginConfig):
        aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
        """The rule that makes one number of per-token losses."""

    config: Config

    def needs(self) -> Needs:
        return Needs(min_group_size=2)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.config.aggregation)

    def credit(self, batch: Batch) -> Credit:
        return Credit(group_advantages(batch.rewards, batch.group_ids, batch.valid, scale="none"))

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        loss_T = -tokens.advantages_T * tokens.logprobs_T
        return TokenLoss(loss_T, {"policy": loss_T})
