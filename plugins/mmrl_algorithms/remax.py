r"""ReMax: REINFORCE with the greedy completion's reward as baseline (arXiv:2310.10505).

    r_it = -beta (log pi_old(y_t) - log pi_ref(y_t)), plus R_i at the last token
    A_it = sum_{s >= t} r_is - R(greedy completion of the prompt)
    L    = 1/B sum_i sum_t -A_it log pi(y_t)

The greedy completion is sampled with the group, scored, and never trained on. One completion per prompt is enough
(``sampler.group_size: 1``); with more, they share the baseline.

Deviations from the paper's code, and why:

- The KL of later tokens counts for earlier ones (a reward-to-go without discount); the code has each token's own KL and
  discounts by 0.99.
- Tokens are summed, as in the paper's equation; the code averages them (``aggregation: token-mean``).
- The code clips the difference of rewards to +-5. ``reward_clip`` bounds each reward, the greedy one too, before the
  difference is taken.
- Sampling is not truncated (the script has top_p 0.9): the learner could not reproduce its log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mmrl.interfaces import AggregationMode, RunFacts
from mmrl.ops.credit import greedy_rewards, reward_to_go, token_rewards
from mmrl.policy_gradient import KLOptions, NotNegative, PolicyGradient, off_policy_warning
from mmrl.types import Batch, Credit, FloatArray, PackedTokens, TokenLoss


class KL(KLOptions):
    """The penalty that keeps the policy near the reference, the initial policy; by default in the reward."""

    coef: NotNegative = 0.05
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "reward"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""


class ReMax(PolicyGradient):
    greedy_rollout = True

    class Config(PolicyGradient.Config):
        aggregation: AggregationMode = "seq-mean-token-sum"
        """The average over per-token losses."""
        kl: KL = KL()
        """The penalty for leaving the initial policy."""
        reward_norm: Literal["none"] = "none"
        """Only none: the greedy completion has no group to be compared with."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        return [*super().check(run), *off_policy_warning(run, "set learner.minibatches: 1 and learner.epochs: 1")]

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        returns = reward_to_go(token_rewards(rewards, batch.masks, kl), batch.masks)
        baselines = greedy_rewards(batch, clip=self.config.reward_clip)
        rows = zip(returns, batch.masks, baselines, strict=True)
        return Credit([np.where(mask, returns_T - baseline, 0.0) for returns_T, mask, baseline in rows])

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import reinforce

        return reinforce(tokens)
