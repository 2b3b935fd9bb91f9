"""Dr. GRPO: GRPO done right (arXiv:2503.20783).

GRPO without the two divisions that favour long wrong answers and easy or hard prompts:

    A_i  = R_i - mean(R)
    rho  = pi(y_t) / pi_old(y_t)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))
    L    = 1/G sum_i 1/L_const sum_t L_it

``L_const`` is a constant of the run, ``length_norm``, by default the generation budget ``sampler.max_new_tokens``.
There is no KL (``kl`` may turn one on). Deviation: a group whose rewards differ by no more than rounding has advantage
0.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.interfaces import AggregationMode
from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import DualClipOptions, PolicyGradient
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class DrGRPO(PolicyGradient):
    min_group_size = 2

    class Config(DualClipOptions, PolicyGradient.Config):
        aggregation: AggregationMode = "seq-mean-token-sum-norm"
        """The average over per-token losses."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid, scale="none"))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
