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

from typing import Literal

from mmrl.policy_gradient import GroupRelative, Positive
from mmrl.types import PackedTokens, TokenLoss


class GMPO(GroupRelative):
    class Config(GroupRelative.Config):
        clip_low: Positive = 0.4
        """A token's log-ratio is clipped below `-clip_low`."""
        clip_high: Positive = 0.4
        """A token's log-ratio is clipped above `clip_high`."""
        aggregation: Literal["seq-mean-token-mean"] = "seq-mean-token-mean"
        """Ratios of sequences go with means over sequences: no other mode is this algorithm."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import geometric_mean

        return geometric_mean(tokens, clip_low=self.config.clip_low, clip_high=self.config.clip_high)
