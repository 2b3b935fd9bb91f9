r"""REBEL: regression to relative rewards (arXiv:2404.16767).

The difference of two completions' log-ratios to the policy before the step is regressed on the difference of their
rewards. With ``x_i = sum_t (log pi(y_it) - log pi_old(y_it))``, for each pair of completions of a prompt,

    L_ij = (x_i - x_j - eta (R_i - R_j))^2

``eta`` is the step size: the least squares solution is mirror descent on the reward, ``pi ~ pi_old exp(eta R)``.

``pairs: all`` is the mean over all pairs of a prompt's ``k`` completions, which the group's means give in one pass,

    2/(k (k - 1)) sum_{i<j} L_ij = 2/(k - 1) sum_i (x_i - mean(x) - eta (R_i - mean(R)))^2

``pairs: extremes`` takes the best and the worst, as the paper does with the completions of UltraFeedback. With two
completions both are the paper's loss.

Deviations from the paper, and why:

- The paper writes ``(x_i - x_j) / eta - (R_i - R_j)``; the square above is ``eta^2`` times that one's, as in the
  authors' code. So the gradient goes to 0 with ``eta``, and a smaller ``eta`` is a smaller step.
- All pairs are a mean over completions, each weighed by ``2k / (k - 1)``: the mean over prompts unless a completion
  could not be scored.
- A group of equal rewards has no extremes, and leaves the loss; with ``all`` it stays, and its log-ratios are held
  together.
- The authors' code takes a KL to the initial policy off the rewards of its summaries, with weight 0.05. There is no
  such penalty here; ``against: reference`` regresses log-ratios to the reference instead, over the whole run.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmrl.ops.credit import best_and_worst
from mmrl.policy_gradient import Positive
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_methods.groups import group_means, group_sizes, usable_rows
from mmrl_methods.regression import GroupRegression, regression_loss


class REBEL(GroupRegression):
    class Config(GroupRegression.Config):
        eta: Positive = 1.0
        """The step size: log-ratios follow this many times the rewards."""
        pairs: Literal["all", "extremes"] = "all"
        """The pairs of a prompt's completions: all, or the best and the worst alone."""

    config: Config

    def credit(self, batch: Batch) -> Credit:
        if self.config.pairs == "all":
            return super().credit(batch)
        rows_M = np.stack(best_and_worst(batch.rewards, batch.group_ids, usable_rows(batch)), 1)
        advantages_B, keep_B = np.zeros(len(batch.rewards)), np.zeros(len(batch.rewards), bool)
        keep_B[rows_M] = True
        advantages_B[rows_M] = batch.rewards[rows_M] - batch.rewards[rows_M].mean(1, keepdims=True)
        return Credit(advantages_B, keep=keep_B)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        ratios_N, rewards_N = self.log_ratios(tokens), tokens.sequence_mean(tokens.advantages_T)
        residuals_N = ratios_N - group_means(tokens, ratios_N) - self.config.eta * rewards_N
        sizes_N = group_sizes(tokens, residuals_N)
        losses_N = 2 * sizes_N / (sizes_N - 1) * residuals_N.square()
        return regression_loss(tokens, losses_N, ratios_N, residuals_N)
