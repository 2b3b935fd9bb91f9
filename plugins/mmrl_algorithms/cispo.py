r"""CISPO: clipped importance-sampling weights (arXiv:2506.13585).

The weight is clipped instead of the update, so no token ever loses its gradient:

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    L_it = -sg[clip(rho, ratio_min, ratio_max)] A_i log pi(y_t),  sg[.] without gradient
    L    = 1/sum_i |y_i| sum_i sum_t L_it,  no KL

``ratio_min`` and ``ratio_max`` are absolute bounds, not offsets from 1 as ``clip_high`` elsewhere. There is no lower
bound by default, as in the paper; the upper one is ScaleRL's 5 (arXiv:2510.13786). The loss's value has no meaning: it
scales with the log-prob.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.policy_gradient import GroupRelative
from mmrl.types import PackedTokens, TokenLoss


class CISPO(GroupRelative):
    class Config(GroupRelative.Config):
        ratio_min: Annotated[float, Field(ge=0, le=1)] = 0.0
        """The ratio's weight is at least this."""
        ratio_max: Annotated[float, Field(ge=1)] = 5.0
        """The ratio's weight is at most this: an absolute bound, not an offset from 1."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import clipped_weight

        return clipped_weight(tokens, ratio_min=self.config.ratio_min, ratio_max=self.config.ratio_max)
