r"""Fine-grained RLHF: PPO with a critic, on rewards of parts of a completion (arXiv:2306.01693, section 2).

With the values ``r_kj`` that reward ``k``, of weight ``w_k``, gives to parts of the text that end with token ``T_kj``:

    r_t = sum_k sum_j 1[t = T_kj] w_k r_kj - beta (log pi_old(y_t) - log pi_ref(y_t))
    A   = generalised advantages of r and of the critic's values, with gamma and lam; G = A + V
    policy  L_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),  A whitened over the batch's tokens
    critic  L_t = 1/2 max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2)

both averaged over tokens. The rewards are those that answer with ``Spans``, such as ``fine_grained`` or ``process``.
``outcome`` names rewards of the whole completion, such as the paper's for completeness; they are at its last token.
Rewards that are neither are not learned from. Default options are those of the released config for long answers
(``kl.coef`` 0.3, ``gamma`` 1, ``lam`` 0.95, clips of 0.2).

Deviations from the paper, and why:

- The released code also whitens the rewards, in each batch and without moving their mean; here they keep their size,
  which the weights choose.
- The KL is one estimate of each token, k1, as in the code. The critic is of the run's own model (section ``critic``);
  there it is a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.interfaces import Needs, RunFacts
from mmrl.ops.credit import gae, valid_masks, whiten
from mmrl.policy_gradient import ClipOptions, KLOptions, NotNegative, PolicyGradient, Positive
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss
from mmrl_methods.token_credit import check_outcome, rewards_of_tokens

Share = Annotated[float, Field(ge=0, le=1)]


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy."""

    coef: NotNegative = 0.3
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "reward"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""


class FineGrainedPPO(PolicyGradient):
    class Config(ClipOptions, PolicyGradient.Config):
        kl: KL = KL()
        """The penalty for leaving the initial policy."""
        outcome: tuple[str, ...] = Field(default=(), strict=False)
        """Components that are rewards of the whole completion, at its last token, each times its weight."""
        gamma: Share = 1.0
        """Discount of each token that follows."""
        lam: Share = 0.95
        """Weight of what follows a token's own surprise in its advantage."""
        value_clip: Positive | None = 0.2
        """Change of a value in a step beyond which it learns no more; null is none."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), values=True, token_rewards=True)

    def check(self, run: RunFacts) -> Sequence[str]:
        check_outcome(self.config.outcome, run.rewards)
        return super().check(run)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        masks = valid_masks(batch)
        assert batch.values is not None
        values = [np.asarray(values_T, np.float64) for values_T in batch.values]
        given = rewards_of_tokens(batch, self.config.outcome, masks)
        given = given if kl is None else [given_T - kl_T for given_T, kl_T in zip(given, kl, strict=True)]
        lam = 1.0 if batch.pretrains else self.config.lam
        advantages = gae(given, values, masks, gamma=self.config.gamma, lam=lam)
        returns = [a_T + np.where(m, v_T, 0.0) for a_T, v_T, m in zip(advantages, values, masks, strict=True)]
        return Credit(whiten(advantages, masks), returns=returns)

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import ppo_clip

        return ppo_clip(tokens, **self.config.clip)

    def value_loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.critic import clipped_value_loss

        return clipped_value_loss(tokens, clip=self.config.value_clip)
