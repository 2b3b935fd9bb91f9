r"""REINFORCE++ (arXiv:2501.03262).

No group and no critic: each token's return is normalised over the whole rollout batch of all ranks.

    r_it = -beta (log pi_old(y_t) - log pi_ref(y_t)), plus R_i at the last token
    G_it = sum_{s >= t} r_is
    A_it = (G_it - mean(G)) / sqrt(var(G) + 1e-8),  over all tokens of the batch
    L_it = max(-A_it rho, -A_it clip(rho, 1 - clip_low, 1 + clip_high))
    L    = 1/sum_i |y_i| sum_i sum_t L_it

One completion per prompt is enough; the batch should have some 500 completions for a useful mean and variance.
Deviations: no discount; tokens that the policy did not write are skipped, and neither reset nor discount the return;
the variance is the sample's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mmrl.ops.credit import reward_to_go, token_rewards, valid_masks, whiten
from mmrl.policy_gradient import DualClipOptions, KLOptions, NotNegative, PolicyGradient
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy; by default in the reward."""

    coef: NotNegative = 0.01
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "reward"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""


class ReinforcePP(PolicyGradient):
    class Config(DualClipOptions, PolicyGradient.Config):
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        masks = valid_masks(batch)
        return Credit(whiten(reward_to_go(token_rewards(rewards, masks, kl), masks), masks))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
