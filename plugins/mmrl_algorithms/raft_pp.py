r"""RAFT++ (arXiv:2504.11343): RAFT with a clipped ratio, for several updates per rollout batch.

    keep_i = 1 if R_i = max(R of the prompt) and R_i > 0
    L_it   = max(-rho, -clip(rho, 1 - clip_low, 1 + clip_high)) = -min(rho, 1 + clip_high)
    L      = 1/N sum_{i kept} sum_t L_it,  N tokens of the kept completions

Groups are treated as in RAFT.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.interfaces import RunFacts
from mmrl.policy_gradient import ClipOptions, PolicyGradient
from mmrl.types import PackedTokens, TokenLoss
from mmrl_algorithms.raft import RAFT


class RAFTPP(RAFT):
    class Config(ClipOptions, RAFT.Config):
        """Options of RAFT, and the clip."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        return PolicyGradient.check(self, run)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)
