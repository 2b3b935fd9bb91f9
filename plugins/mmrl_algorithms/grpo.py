r"""GRPO: group relative policy optimization (arXiv:2402.03300, equations 3 and 4).

For each prompt, ``G`` completions with rewards ``R_1..R_G``:

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    rho  = pi(y_t) / pi_old(y_t)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)) + beta KL_t(pi || pi_ref)
    L    = 1/G sum_i 1/|y_i| sum_t L_it

Deviations from the paper, and why:

- ``std`` is the sample's (``std_ddof: 1``), as in every implementation; the paper only writes "std".
- A group of equal rewards, or of one, has advantage exactly 0 (the paper's 0/0).
- ``kl.coef`` is 0 by default (the paper has 0.04, estimator k3): with verifiable rewards the reference policy is
  usually left out, and then it is not even loaded.
- ``kl.where: reward`` subtracts ``beta sum_t (log pi_old - log pi_ref)`` from a completion's reward instead, before
  the group's statistics; only the estimator k1 is unbiased there.
"""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import AggregationMode, KLEstimator
from mmrl.policy_gradient import DualClipOptions, GroupRelative, KLOptions
from mmrl.types import PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy; in the loss k3, as in the paper."""

    loss_estimator: ClassVar[KLEstimator] = "k3"


class GRPO(GroupRelative):
    class Config(DualClipOptions, GroupRelative.Config):
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
