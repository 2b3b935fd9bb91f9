r"""GRPO: group relative policy optimization (arXiv:2402.03300, equations 3 and 4).

For each prompt, ``G`` completions with rewards ``R_1..R_G``:

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    rho  = pi(y_t) / pi_old(y_t)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)) + beta KL_t(pi || pi_ref)
    L    = 1/G sum_i 1/|y_i| sum_t L_it

Deviations from the paper, and why:

- ``std`` is the sample's (``std_ddof: 1``), as in every implementation; the paper only writes "std".
- A group of equal rewards, or of one, has advantage exactly 0 (the paper's 0/0).
- ``kl.coef`` is 0 by default (the paper has 0.04): with verifiable rewards the reference policy is usually left out,
  and then it is not even loaded.
- ``kl.where: reward`` subtracts ``beta sum_t (log pi_old - log pi_ref)`` from a completion's reward instead, before
  the group's statistics; only the estimator k1 is unbiased there.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import Aggregation, AggregationMode, Algorithm, Needs, PluginConfig
from mmrl.ops.credit import group_advantages, sequence_kl
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss


class KL(PluginConfig):
    """The penalty that keeps the policy near the reference, the initial policy."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "loss"
    """Added to each token's loss, or subtracted from each completion's reward."""
    estimator: Literal["k1", "k2", "k3", "k3+", "k3_is", "abs", "mse", "low_var_kl"] | None = None
    """Per-token estimator; by default k3 in the loss (as in the paper) and k1 in the reward."""

    @model_validator(mode="after")
    def _check(self) -> KL:
        if self.where == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(f"estimator {self.estimator!r} in the reward is biased; leave it out or use k1")
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("estimator 'k1' in the loss has zero expected gradient; use k2 or k3, or where: reward")
        return self


class GRPO(Algorithm):
    class Config(PluginConfig):
        clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """The ratio is clipped below ``1 - clip_low``."""
        clip_high: Annotated[float, Field(gt=0)] = 0.2
        """The ratio is clipped above ``1 + clip_high``."""
        dual_clip: Annotated[float, Field(gt=1)] | None = None
        """Bound ``c`` on the loss of negative advantages, ``-c A``; greater than ``1 + clip_high``."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """How per-token losses are averaged."""
        length_norm: Annotated[float, Field(gt=0)] | None = None
        """The constant of ``seq-mean-token-sum-norm``, usually ``sampler.max_new_tokens``."""
        std_eps: Annotated[float, Field(gt=0)] = 1e-6
        """Added to the standard deviation of a group's rewards."""
        std_ddof: Literal[0, 1] = 1
        """1 for the sample's standard deviation, 0 for the population's."""
        kl: KL = KL()

        @model_validator(mode="after")
        def _check(self) -> GRPO.Config:
            if (self.aggregation == "seq-mean-token-sum-norm") != (self.length_norm is not None):
                raise ValueError("length_norm goes with aggregation: seq-mean-token-sum-norm, which needs it")
            if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
                raise ValueError(f"dual_clip must be greater than 1 + clip_high = {1 + self.clip_high}")
            return self

    config: Config

    def needs(self) -> Needs:
        kl = self.config.kl
        return Needs(
            reference_logprobs=kl.coef > 0, old_logprobs=kl.coef > 0 and kl.where == "reward", min_group_size=2
        )

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.config.aggregation, self.config.length_norm)

    def credit(self, batch: Batch) -> Credit:
        rewards, metrics = batch.rewards, {}
        if self.needs().old_logprobs:
            assert batch.old_logprobs is not None
            assert batch.reference_logprobs is not None
            kl_B = sequence_kl(batch.old_logprobs, batch.reference_logprobs, batch.masks)
            rewards = rewards - self.config.kl.coef * kl_B
            lengths_B = np.array([np.count_nonzero(mask) for mask in batch.masks])
            metrics["kl/reference"] = float(kl_B[batch.valid].sum() / max(lengths_B[batch.valid].sum(), 1))
        advantages_B = group_advantages(
            rewards, batch.group_ids, batch.valid, ddof=self.config.std_ddof, eps=self.config.std_eps
        )
        return Credit(advantages_B, metrics=metrics)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.kl import kl_per_token
        from mmrl.ops.surrogate import ppo_clip

        policy = ppo_clip(
            tokens.logprobs_T,
            tokens.old_logprobs_T,
            tokens.advantages_T,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
        )
        metrics = {
            "policy/clip_fraction_high": policy.clipped_high_T,
            "policy/clip_fraction_low": policy.clipped_low_T,
        }
        kl = self.config.kl
        if not kl.coef or kl.where == "reward":
            return TokenLoss(policy.loss_T, {"policy": policy.loss_T}, metrics)
        assert tokens.reference_logprobs_T is not None
        kl_T = kl_per_token(kl.estimator or "k3", tokens.logprobs_T, tokens.reference_logprobs_T, tokens.old_logprobs_T)
        metrics["kl/reference"] = kl_T
        terms = {"policy": policy.loss_T, "kl": kl.coef * kl_T}
        return TokenLoss(policy.loss_T + kl.coef * kl_T, terms, metrics)
