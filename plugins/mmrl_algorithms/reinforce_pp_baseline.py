r"""REINFORCE++-baseline (arXiv:2501.03262): the group's mean as baseline, the batch's deviation as scale.

    A'_i = R_i - mean(R of the prompt)
    A_it = (A'_i - mean(A')) / sqrt(var(A') + 1e-8),  over all tokens of the batch
    L_it = max(-A_it rho, -A_it clip(rho, 1 - clip_low, 1 + clip_high)) + beta KL_t(pi || pi_ref)
    L    = 1/sum_i |y_i| sum_i sum_t L_it

The KL is a term of the loss, estimator k2, whose gradient is that of KL(pi || pi_ref).

Groups of one are left out of mean and variance and get 0. The average is over tokens, so long completions weigh more,
and a group of equal rewards is not exactly 0 afterwards; ``level: sample`` counts each completion once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mmrl.ops.credit import group_advantages, grouped, less_sequence_kl, valid_masks, whiten
from mmrl.policy_gradient import DualClipOptions, KLOptions, NotNegative, PolicyGradient
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy."""

    coef: NotNegative = 1e-3
    """Its weight, beta; 0 loads no reference policy."""


class ReinforcePPBaseline(PolicyGradient):
    min_group_size = 2

    class Config(DualClipOptions, PolicyGradient.Config):
        level: Literal["token", "sample"] = "token"
        """Mean and variance of the batch are taken over tokens, or over samples."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        centred_B = group_advantages(rewards, batch.group_ids, batch.valid, scale="none")
        masks = valid_masks(batch, grouped(batch.group_ids, batch.valid))
        if self.config.level == "sample":
            return Credit(whiten([centred_B], [np.array([mask.any() for mask in masks])])[0])
        return Credit(whiten([np.full(len(m), a) for m, a in zip(masks, centred_B, strict=True)], masks))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
