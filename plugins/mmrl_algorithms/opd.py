r"""OPD: on-policy distillation (arXiv:2306.13649 with the reverse KL; per token as an advantage in arXiv:2505.09388).

The policy writes completions, and a teacher (``reference.path``) is asked what it thinks of each token:

    A_t  = log pi_teacher(y_t) - log pi_old(y_t)
    rho  = pi(y_t) / pi_old(y_t)
    L_t  = max(-A_t rho, -A_t clip(rho, 1 - clip_low, 1 + clip_high))

The mean of ``-A_t`` over the policy's own tokens is an estimate of KL(pi || pi_teacher), and the gradient of the loss
is that of this KL, token by token: what a token leads to later is not counted (a discount of 0). No reward is needed.

Deviations, and why:

- A_t is neither whitened nor centred: at 0 teacher and policy agree on the token, and it teaches nothing.
- Both are read at ``sampler.temperature``, over the token ids that the policy may sample.
- Rewards that a run has are metrics. With ``reward_coef`` they are learned from too, as ``grpo`` does:
  ``A_t + reward_coef (R - mean(R)) / (std(R) + eps)``, the mean and the deviation of the prompt's group.
- With the initial policy as reference (no ``reference.path``) it holds the policy where it was, so a teacher is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import AggregationMode, Needs
from mmrl.ops.credit import group_advantages, token_kl, valid_masks
from mmrl.policy_gradient import DualClipOptions, PolicyGradient, StdOptions
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class OPD(PolicyGradient):
    class Config(DualClipOptions, StdOptions, PolicyGradient.Config):
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""
        reward_coef: Annotated[float, Field(ge=0)] = 0.0
        """Weight of the rewards' advantages beside the teacher's; 0: rewards are metrics, and there need be none."""

        @model_validator(mode="after")
        def _check_teaching(self) -> OPD.Config:
            if self.kl.coef:
                raise ValueError("kl.coef is for a reference beside the rewards; here the reference is the teacher")
            wanting = {
                "dynamic_sampling": self.dynamic_sampling is not None,
                "reward_norm": self.reward_norm != "none",
                "reward_clip": self.reward_clip is not None,
            }
            for name in (name for name, is_set in wanting.items() if is_set and not self.reward_coef):
                raise ValueError(f"{name} is about rewards, and reward_coef is 0: nothing is learned from them")
            return self

    config: Config

    def needs(self) -> Needs:
        learns_rewards = self.config.reward_coef > 0
        return replace(
            super().needs(),
            reference_logprobs=True,
            old_logprobs=True,
            rewards=learns_rewards,
            min_group_size=2 if learns_rewards else 1,
        )

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        assert batch.old_logprobs is not None
        assert batch.reference_logprobs is not None
        masks = valid_masks(batch)
        gaps = token_kl(batch.old_logprobs, batch.reference_logprobs, masks)
        advantages = [-gap_T for gap_T in gaps]
        if self.config.reward_coef:
            rewarded_B = group_advantages(rewards, batch.group_ids, batch.valid, **self.config.std)
            added_B = self.config.reward_coef * rewarded_B
            advantages = [a_T + added * mask for a_T, added, mask in zip(advantages, added_B, masks, strict=True)]
        tokens = np.concatenate([gap_T[mask] for gap_T, mask in zip(gaps, masks, strict=True)])
        return Credit(advantages, metrics=_metrics(tokens))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)


def _metrics(gaps: FloatArray) -> dict[str, float]:
    """``distill/kl`` and ``distill/abs_gap``: means over the policy's tokens of ``log pi_old - log pi_teacher`` and of
    its size; 0 without tokens."""
    if not len(gaps):
        return {"distill/kl": 0.0, "distill/abs_gap": 0.0}
    return {"distill/kl": float(gaps.mean()), "distill/abs_gap": float(np.abs(gaps).mean())}
