r"""LUFFY: learning to reason under off-policy guidance (arXiv:2504.14945).

The row's own demonstration is one more member of its group. It is scored, and compared with the others, as any of
them: where all that the policy samples is wrong, it alone is right. Advantages are ``A_i = R_i - mean(R)`` over the
whole group, and the losses

    -A_i rho, clipped as in PPO            tokens that the policy sampled
    -A_i p / (p + gamma)                   tokens of the demonstration, p = pi(y_t)

The second has no ratio, since nobody knows the demonstration's policy, and no clip. Its gradient is that of ``log pi``
times ``gamma p / (p + gamma)^2``: largest at ``p = gamma``, so that tokens that the policy finds unlikely count, and
those that it is sure of do not.

Deviations from the paper and its code, and why:

- ``clip_low`` and ``clip_high`` are PPO's 0.2 for sampled tokens; the authors' runs leave that clip out.
- A group has one demonstration; the paper's has one too, of 8.
- ``scale: group`` divides by the group's deviation as GRPO does; the authors' runs do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mmrl.interfaces import AggregationMode, Needs
from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import DualClipOptions, PolicyGradient, Positive, StdOptions
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class LUFFY(PolicyGradient):
    class Config(DualClipOptions, StdOptions, PolicyGradient.Config):
        gamma: Positive = 0.1
        """The probability at which a token of the demonstration counts most."""
        scale: Literal["none", "group"] = "none"
        """The divisor of advantages: none, or the deviation of the group's rewards."""
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), demonstration=True)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        options = {"scale": self.config.scale, **self.config.std}
        return Credit(group_advantages(less_sequence_kl(rewards, kl), batch.group_ids, batch.valid, **options))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        from mmrl.ops.surrogate import ppo_clip

        result, given_T = ppo_clip(tokens, **self.config.clip), tokens.given_N[tokens.sequence_T]
        probability_T = tokens.logprobs_T.exp()
        shaped_T = probability_T / (probability_T + self.config.gamma)
        loss_T = torch.where(given_T, -tokens.advantages_T * shaped_T, result.loss_T)
        metrics = {
            name: torch.where(given_T, torch.zeros_like(values_T), values_T)
            for name, values_T in result.metrics.items()
        }
        nothing_T = torch.zeros_like(probability_T)
        metrics["luffy/given_probability"] = torch.where(given_T, probability_T.detach(), nothing_T)
        return TokenLoss(loss_T, {"policy": loss_T}, metrics)
