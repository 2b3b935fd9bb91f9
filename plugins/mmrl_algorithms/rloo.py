r"""RLOO: REINFORCE leave-one-out (arXiv:2402.14740).

The baseline of a completion is the mean reward of the others of its prompt:

    R_i = r_i - beta sum_t (log pi_old(y_t) - log pi_ref(y_t))
    A_i = R_i - 1/(G - 1) sum_{j != i} R_j
    L   = 1/B sum_i sum_t -A_i log pi(y_t)

The whole completion is one action: log-probs are summed, not averaged. There is no ratio and no clip, which is right
for one update per rollout batch. For several there are

- ``loss: ppo_clip``, GRPO's clipped ratio per token, and
- ``loss: sequence_clip``, a clipped ratio ``exp(sum_t log(pi / pi_old))`` per completion, with
  ``aggregation: seq-mean-token-mean``; for long completions it leaves its clip at once.

Deviations from the paper: a group whose rewards differ by no more than rounding, or of one, has advantage 0; the KL is
taken over the tokens that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from mmrl.interfaces import AggregationMode, RunFacts
from mmrl.ops.credit import leave_one_out, less_sequence_kl
from mmrl.policy_gradient import DualClipOptions, KLOptions, NotNegative, PolicyGradient, off_policy_warning
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy; by default in the reward."""

    coef: NotNegative = 0.03
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "reward"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""


class RLOO(PolicyGradient):
    min_group_size = 2

    class Config(DualClipOptions, PolicyGradient.Config):
        loss: Literal["reinforce", "ppo_clip", "sequence_clip"] = "reinforce"
        """The paper's, or one with a ratio, for several updates per rollout batch."""
        aggregation: AggregationMode = "seq-mean-token-sum"
        """The average over per-token losses."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""

        @model_validator(mode="after")
        def _check_loss(self) -> RLOO.Config:
            clips = self.model_fields_set & {"clip_low", "clip_high", "dual_clip"}
            if self.loss == "reinforce" and any(getattr(self, c) != type(self).model_fields[c].default for c in clips):
                raise ValueError(f"{', '.join(sorted(clips))} and loss: reinforce, which has no clip")
            if self.loss == "sequence_clip" and self.dual_clip is not None:
                raise ValueError("dual_clip is not defined for loss: sequence_clip")
            if self.loss == "sequence_clip" and self.aggregation != "seq-mean-token-mean":
                raise ValueError("loss: sequence_clip needs aggregation: seq-mean-token-mean")
            return self

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        off_policy = off_policy_warning(run, "set loss: ppo_clip") if self.config.loss == "reinforce" else ()
        return [*super().check(run), *off_policy]

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        return Credit(leave_one_out(rewards, batch.group_ids, batch.valid))

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip, reinforce, sequence_clip

        if self.config.loss == "reinforce":
            return reinforce(tokens)
        if self.config.loss == "sequence_clip":
            return sequence_clip(tokens, clip_low=self.config.clip_low, clip_high=self.config.clip_high, over="sum")
        return ppo_clip(tokens, **self.config.clip)
