r"""AEPO: the policy update of agentic entropy-balanced policy optimization (arXiv:2510.14545).

Arbitrary entropy (arXiv:2510.08141) and adaptive exploration (arXiv:2508.05731) policy optimization have the same
letters; this is the one of the paper named here.

GRPO with two changes for tokens of high entropy ``H``. With ``rho = pi / pi_old`` and ``sg`` without gradient,

    A_it = A_i (1 + alpha (H_it - mean(H_i)) / std(H_i))
    L_it = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))                    as in PPO, but
    L_it = -A (1 + clip_high) rho / sg(rho)        where A > 0 and rho > 1 + clip_high

The first gives more credit to tokens at which the policy was undecided. The second keeps the gradient of tokens whose
ratio has left the clip above, with a bounded weight: those are often of high entropy, and PPO forgets them.

The paper's equations could not be read; both changes are written after its abstract and its reviews ("a stop-gradient
in the high-entropy clipping term", "entropy-aware advantage estimation"). So ``alpha`` is chosen here, and:

- Mean and deviation of the entropies are those of the completion's own tokens. A deviation of 0 leaves ``A_i``.
- The factor is at least 0: a sure token does not turn the sign of its advantage.
- The paper's other half, an allocation of samples to branches at turns of high entropy, is another matter
  (``Needs.branches``), and not part of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.interfaces import AggregationMode
from mmrl.policy_gradient import ClipOptions, GroupRelative, NotNegative
from mmrl.types import PackedTokens, TokenLoss

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Exponents are clamped at it, on both sides."""


class AEPO(GroupRelative):
    class Config(ClipOptions, GroupRelative.Config):
        alpha: NotNegative = 0.2
        """Weight of a token's standardised entropy in its advantage; 0 leaves advantages alone."""
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        config = self.config
        factor_T = (1 + config.alpha * standardised(tokens, tokens.entropy_T.detach())).clamp(min=0)
        advantages_T = tokens.advantages_T * factor_T
        ratio_T = (tokens.logprobs_T - tokens.old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        high_T = (advantages_T > 0) & (ratio_T > 1 + config.clip_high)
        low_T = (advantages_T < 0) & (ratio_T < 1 - config.clip_low)
        # The value is the bound, and the gradient is that of the log-prob times the bound.
        one_T = (tokens.logprobs_T - tokens.logprobs_T.detach()).exp()
        ratio_T = torch.where(high_T, (1 + config.clip_high) * one_T, ratio_T)
        ratio_T = torch.where(low_T, torch.full_like(ratio_T, 1 - config.clip_low), ratio_T)
        loss_T = -advantages_T * ratio_T
        metrics = {
            "policy/clip_fraction_high": high_T.to(loss_T),
            "policy/clip_fraction_low": low_T.to(loss_T),
            "aepo/entropy_factor": factor_T,
        }
        return TokenLoss(loss_T, {"policy": loss_T}, metrics)


def standardised(tokens: PackedTokens, values_T: torch.Tensor) -> torch.Tensor:
    """(T,) values less the mean of their sequence's tokens in the loss, over their deviation; 0 where that is 0."""
    import torch

    centred_T = torch.where(tokens.mask_T, values_T, 0.0) - tokens.sequence_mean(values_T)[tokens.sequence_T]
    std_T = tokens.sequence_mean(centred_T.square()).sqrt()[tokens.sequence_T]
    return torch.where(tokens.mask_T & (std_T > 1e-6), centred_T / std_T.clamp(min=1e-6), torch.zeros_like(centred_T))
