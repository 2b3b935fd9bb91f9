"""Advantages relative to a prompt's group, which GRPO and its variants have in common."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import PolicyGradient, StdOptions
from mmrl.types import Batch, Credit, FloatArray


class GroupRelative(PolicyGradient):
    """Base of algorithms whose advantages are ``A_i = (R_i - mean(R)) / (std(R) + eps)``."""

    min_group_size = 2

    class Config(StdOptions, PolicyGradient.Config):
        """The options of GRPO's advantages."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid, **self.config.std))
