r"""Reinforce-Rej (arXiv:2504.11343): REINFORCE on the prompts whose completions are neither all right nor all wrong.

    keep_i = 1 if the rewards of the prompt are not all equal
    A_i    = R_i
    L_it   = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))
    L      = 1/N sum_{i kept} sum_t L_it,  N tokens of the kept completions

No mean and no deviation: with rewards of 0 and 1 only right completions push. The rejected groups leave the denominator
too, and nothing is sampled for them (``dynamic_sampling`` does that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mmrl.ops.credit import less_sequence_kl, mixed_groups
from mmrl.policy_gradient import DualClipOptions, PolicyGradient
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class ReinforceRej(PolicyGradient):
    min_group_size = 2

    class Config(DualClipOptions, PolicyGradient.Config):
        reward_norm: Literal["none"] = "none"
        """Only none: the rewards' own values decide what is learned from."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        mixed_B = mixed_groups(rewards, batch.group_ids, batch.valid)
        return Credit(less_sequence_kl(rewards, kl), keep=mixed_B)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
