r"""RAFT: reward-ranked fine-tuning (arXiv:2304.06767; with RL's vocabulary in arXiv:2504.11343).

Maximum likelihood of each prompt's best completions:

    keep_i = 1 if R_i = max(R of the prompt) and R_i > 0
    L      = 1/N sum_{i kept} sum_t -log pi(y_t),  N tokens of the kept completions

Groups without a reward above 0 contribute nothing: the best of only wrong answers is still wrong. Equally good
completions are all kept (the paper keeps one). The KL may be in the loss but not in the reward, which only ranks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mmrl.interfaces import RunFacts
from mmrl.ops.credit import best_of_group
from mmrl.policy_gradient import KLOptions, PolicyGradient, off_policy_warning
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy."""

    where: Literal["loss"] = "loss"
    """Only in the loss: here the reward only ranks."""


class RAFT(PolicyGradient):
    class Config(PolicyGradient.Config):
        kl: KL = KL()
        """The penalty for leaving the initial policy."""
        reward_norm: Literal["none"] = "none"
        """Only none: the rewards' own values decide what is learned from."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        return [*super().check(run), *off_policy_warning(run, "choose raft_pp")]

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        best_B = best_of_group(rewards, batch.group_ids, batch.valid)
        return Credit(best_B.astype(np.float64), keep=best_B)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import reinforce

        return reinforce(tokens)
