r"""ASPO: asymmetric importance sampling policy optimization (arXiv:2510.06062).

Other methods are called ASPO too; this is the one of the paper named here.

In PPO's gradient the ratio of a token is its weight: a token with a positive advantage that has become less likely
than it was is weighed down, although it has the most to gain. ASPO turns the ratio of these over. With ``rho = pi /
pi_old`` and ``sg`` without gradient, a token's gradient is that of ``-A sg(w) log pi``, with

    A > 0    w = min(1 / rho, dual_clip),  0 where rho > 1 + clip_high
    A < 0    w = min(rho, dual_clip),      0 where rho < 1 - clip_low

and advantages are GRPO's. Beyond ``dual_clip`` the weight is bounded and the gradient stays: a soft clip.

Deviations from the paper and its code, and why:

- The loss's value is ``-A w`` for each token. In the authors' code it is ``-A w log pi`` beyond ``dual_clip``, which
  has the same gradient.
- The authors' runs widen both clips to 0.4 for the fifth of a completion's tokens with the highest entropy, which
  comes from their earlier Archer. Here one clip is for all tokens.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.interfaces import AggregationMode
from mmrl.policy_gradient import ClipOptions, GroupRelative
from mmrl.types import PackedTokens, TokenLoss

MAX_LOG_RATIO = 20.0
"""Exponents are clamped at it, on both sides."""


class ASPO(GroupRelative):
    class Config(ClipOptions, GroupRelative.Config):
        dual_clip: Annotated[float, Field(gt=1)] = 3.0
        """The largest weight of a token."""
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        config, advantages_T = self.config, tokens.advantages_T
        log_ratio_T = (tokens.logprobs_T - tokens.old_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_T, is_good_T = log_ratio_T.exp(), advantages_T > 0
        high_T = is_good_T & (ratio_T > 1 + config.clip_high)
        low_T = (advantages_T < 0) & (ratio_T < 1 - config.clip_low)
        weight_T = torch.where(is_good_T, (-log_ratio_T).exp(), ratio_T)
        soft_T = weight_T > config.dual_clip
        # 1 in value, with the gradient of the log-prob.
        one_T = (tokens.logprobs_T - tokens.logprobs_T.detach()).exp()
        one_T = torch.where(high_T | low_T, one_T.detach(), one_T)
        loss_T = -advantages_T * weight_T.clamp(max=config.dual_clip) * one_T
        fractions = {"high": high_T, "low": low_T, "dual": soft_T & (advantages_T != 0)}
        metrics = {f"policy/clip_fraction_{side}": where_T.to(loss_T) for side, where_T in fractions.items()}
        return TokenLoss(loss_T, {"policy": loss_T}, metrics)
