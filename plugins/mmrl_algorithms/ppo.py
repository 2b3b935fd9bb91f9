r"""PPO with a critic (arXiv:1707.06347; generalised advantages: arXiv:1506.02438).

Over the tokens ``k`` that the policy wrote, the last of which gets the reward, with ``V_k`` the critic's value at the
place that predicts token ``k``, before the step:

    r_k = -beta (log pi_old(y_k) - log pi_ref(y_k)), plus R at the last token
    d_k = r_k + gamma V_{k+1} - V_k,    V after the last token = 0
    A_k = d_k + gamma lam A_{k+1}
    G_k = A_k + V_k,                    A here with lam_returns
    policy  L_k = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),  A whitened over the batch's tokens
    critic  L_k = 1/2 max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2)

both averaged over tokens. Tokens that the policy did not write (a tool's answer, the next turn's question) are skipped:
the value of the next token that it wrote follows, so an episode is one sequence across its turns.

- The last value is 0 also where a limit ended the completion. ``bootstrap: true`` puts the critic's value after the
  last token there, as if the policy had gone on: right where a limit cuts what would have been rewarded, wrong where
  running into the limit is the mistake.
- ``critic.pretrain_steps`` (config): in these steps the critic alone learns, and returns are what was earned (lam 1).
- ``lam: {adaptive: alpha}`` is ``1 - 1 / (alpha l)`` for a completion of ``l`` tokens, at least 0.
- ``positive_nll: mu`` adds ``mu`` times the mean of ``-log pi`` over the tokens of completions that are right. Right is
  a reward of at least ``positive_reward``: the weighted sum, before KL. The mean is over the rollout batch's tokens.

Two papers are configs of this algorithm:

- VC-PPO (arXiv:2503.01491): a critic that begins as a reward model, or as the policy, is wrong about early tokens, and
  with lam 0.95 a reward at the end fades before it reaches them. So the critic is pretrained on returns of the fixed
  policy, and learns with ``lam_returns: 1.0`` while the policy keeps ``lam: 0.95``. Config: these two, ``critic:
  {pretrain_steps: 100}``, ``kl: {coef: 0}``.
- VAPO (arXiv:2504.05118): VC-PPO, and ``lam: {adaptive: 0.05}``, ``clip_high: 0.28``, the mean over tokens,
  ``positive_nll: 0.1``, several completions of each prompt (16 of 512 prompts). Config: these, ``critic:
  {pretrain_steps: 50}``, ``kl: {coef: 0}``.

Deviations: values are clipped by 0.5 (arXiv:1707.06347's code has 0.2, as its policy; null clips nothing); the critic
has weights of its own and no coefficient in a common loss; it learns all valid rows, also those that ``mask_truncated``
keeps from the policy; the whitening's variance is the sample's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import Needs, PluginConfig
from mmrl.ops.credit import gae, token_rewards, valid_masks, whiten
from mmrl.policy_gradient import DualClipOptions, NotNegative, PolicyGradient, Positive
from mmrl.types import Batch, BoolArray, Credit, FloatArray, PackedTokens, TokenLoss
from mmrl_algorithms.reinforce_pp import KL

Share = Annotated[float, Field(ge=0, le=1)]
TOLERANCE = 1e-6
"""Sums of weighted rewards travel as float32."""


class AdaptiveLambda(PluginConfig):
    """A lambda that grows with the completion, `1 - 1 / (adaptive l)` (arXiv:2504.05118)."""

    adaptive: Positive
    """The more, the closer to 1 for a length; 0.05 gives 0.8 for 100 tokens and 0.98 for 1000."""


class PPO(PolicyGradient):
    class Config(DualClipOptions, PolicyGradient.Config):
        kl: KL = KL()
        """The penalty for leaving the initial policy."""
        gamma: Share = 1.0
        """Discount of each token that follows."""
        lam: Share | AdaptiveLambda = 0.95
        """Weight of what follows a token's own surprise in its advantage: 0 trusts the critic, 1 what was earned; or
        `{adaptive: alpha}`, 1 - 1 / (alpha l) for a completion of l tokens."""
        lam_returns: Share | AdaptiveLambda | None = None
        """The same in the returns that the critic learns; null is `lam`."""
        whiten: bool = True
        """Divide advantages by their deviation over the batch's tokens, less their mean."""
        value_clip: Positive | None = 0.5
        """Change of a value in a step beyond which it learns no more; null is none."""
        bootstrap: bool = False
        """Take the critic's value after the last token of completions that a limit ended; false takes 0."""
        positive_nll: NotNegative = 0.0
        """Weight of the mean -log pi over tokens of completions that are right."""
        positive_reward: float = 1.0
        """The reward from which a completion is right, for `positive_nll`."""

        @model_validator(mode="after")
        def _check_positive(self) -> PPO.Config:
            if self.positive_nll and self.aggregation != "token-mean":
                raise ValueError("positive_nll is a mean over tokens; leave aggregation at token-mean")
            return self

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), values=True, last_state=self.config.bootstrap)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        config, masks = self.config, valid_masks(batch)
        assert batch.values is not None
        values = [np.asarray(values_T, np.float64) for values_T in batch.values]
        rewards_BT = token_rewards(rewards, masks, kl)
        final_B = batch.final_values if config.bootstrap else None

        def estimated(lam: float | FloatArray) -> list[FloatArray]:
            return gae(rewards_BT, values, masks, gamma=config.gamma, lam=lam, final_values=final_B)

        advantages = estimated(_lambdas(config.lam, masks))
        learned = advantages
        if batch.pretrains:
            learned = estimated(1.0)
        elif config.lam_returns is not None:
            learned = estimated(_lambdas(config.lam_returns, masks))
        returns = [a_T + np.where(m, v_T, 0.0) for a_T, v_T, m in zip(learned, values, masks, strict=True)]
        return Credit(whiten(advantages, masks) if config.whiten else advantages, returns=returns)

    def credit(self, batch: Batch) -> Credit:
        credit = super().credit(batch)
        if not self.config.positive_nll:
            return credit
        lengths_B = np.array([np.count_nonzero(mask) for mask in valid_masks(batch, credit.keep)])
        right_B = np.asarray(batch.rewards) >= self.config.positive_reward - TOLERANCE
        right = int(lengths_B[right_B].sum())
        constants = {**credit.constants, "positive_scale": float(lengths_B.sum() / right) if right else 0.0}
        return replace(credit, constants=constants)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        result = super().loss(tokens)
        if not self.config.positive_nll:
            return result
        right_T = (tokens.score_N >= self.config.positive_reward - TOLERANCE)[tokens.sequence_T]
        weight_T = self.config.positive_nll * tokens.constants["positive_scale"] * right_T.to(tokens.logprobs_T.dtype)
        nll_T = -weight_T * tokens.logprobs_T
        terms = {**result.terms, "positive_nll": nll_T}
        return replace(result, loss_T=result.loss_T + nll_T, terms=terms)

    def value_loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.critic import clipped_value_loss

        return clipped_value_loss(tokens, clip=self.config.value_clip)


def _lambdas(lam: float | AdaptiveLambda, masks: Sequence[BoolArray]) -> float | FloatArray:
    """The number itself, or one for each row, by the tokens that the policy wrote."""
    if isinstance(lam, float):
        return lam
    lengths_B = np.array([np.count_nonzero(mask) for mask in masks], np.float64)
    return np.maximum(1 - 1 / (lam.adaptive * np.maximum(lengths_B, 1)), 0.0)
