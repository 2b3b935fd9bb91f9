r"""GMPO: geometric-mean policy optimization (arXiv:2507.20673).

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    d_it = log(pi(y_t) / pi_old(y_t))
    c_it = min(d_it, clip_high) if A_i >= 0, else max(d_it, -clip_low)
    L_i  = -A_i exp(1/|y_i| sum_t c_it)
    L    = 1/G sum_i L_i,  no KL

As in GSPO the ratio is a geometric mean over the sequence; unlike there, each token is clipped before the mean, so only
the outlying tokens lose their gradient. The bounds are log-ratios: 0.4 leaves ``pi / pi_old`` between 0.67 and 1.49.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import PolicyGradient, Positive, StdOptions
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class GMPO(PolicyGradient):
    min_group_size: ClassVar[int] = 2

    class Config(StdOptions, PolicyGradient.Config):
        clip_low: Positive = 0.4
        """A token's log-ratio is clipped below `-clip_low`."""
        clip_high: Positive = 0.4
        """A token's log-ratio is clipped above `clip_high`."""
        aggregation: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
        """Ratios of sequences go with means over sequences: no other mode is this algorithm."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid, **self.config.std))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import geometric_mean

        return geometric_mean(tokens, clip_low=self.config.clip_low, clip_high=self.config.clip_high)
