"""GRPO (arXiv:2402.03300, equations 3 and 4) for methods of this package that differ in what is sampled or credited."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import AggregationMode, KLEstimator
from mmrl.policy_gradient import DualClipOptions, GroupRelative, KLOptions
from mmrl.types import PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy; in the loss k3, as in the paper."""

    loss_estimator: ClassVar[KLEstimator] = "k3"


class GRPO(GroupRelative):
    """A prompt's completions are compared with each other, and ratios of tokens are clipped."""

    class Config(DualClipOptions, GroupRelative.Config):
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
