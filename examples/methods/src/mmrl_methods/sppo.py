r"""SPPO: self-play preference optimization (arXiv:2405.00675).

The log-ratio of a completion to the policy of the iteration before is regressed on its win rate against that policy.
With ``x_i = sum_t (log pi(y_it) - log pi_k(y_it))`` and the win rate ``P_i`` over the ``K`` completions of the prompt,

    P_i = 1/K sum_j P(y_i > y_j)
    L_i = (x_i - eta (P_i - 1/2))^2

and the step's loss is the mean over completions. Its solution is a step of multiplicative weights, whose average
policy goes to the Nash equilibrium of the preference. ``eta`` is 1000 in the paper, and the authors' code has ``beta
= 1/eta``.

``win_rate`` says where ``P(y_i > y_j)`` comes from: ``bradley_terry`` is ``s(R_i - R_j)`` with the logistic function
``s``, as the authors' code has it of PairRM's scores; ``compare`` is 1, 1/2 or 0 for a higher, an equal or a lower
reward; ``given`` takes a reward as ``P_i`` itself, such as a judge's share of won comparisons.

``completions: extremes`` learns from the best and the worst alone, as the authors' code; the paper's algorithm has
all.

Deviations from the paper, and why:

- ``pi_k`` is the reference, and the iterations of the paper are ``reference.reset_every``. ``against: old`` makes each
  step an iteration; with one optimizer step in it ``x`` is 0 and the step is a policy gradient with advantage
  ``2 eta (P_i - 1/2)``.
- A prompt of equal win rates stays in the loss, which then holds ``x`` near 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from mmrl.interfaces import Needs, SourceName
from mmrl.ops.credit import TOLERANCE, best_and_worst, grouped, members_of
from mmrl.policy_gradient import Positive
from mmrl.types import Batch, BoolArray, Credit, FloatArray, PackedTokens, TokenLoss
from mmrl_methods.groups import usable_rows
from mmrl_methods.regression import Regression, regression_loss


class SPPO(Regression):
    class Config(Regression.Config):
        against: Literal["old", "reference"] = "reference"
        """The policy of the iteration before: the reference, or the one before the step."""
        data: Literal["given", "sampled"] = "sampled"
        """The dataset's own candidates with their scores, or groups that the policy samples and rewards score."""
        eta: Positive = 1000.0
        """Log-ratios follow this many times the win rate less 1/2."""
        win_rate: Literal["bradley_terry", "compare", "given"] = "bradley_terry"
        """The probability that one completion is better than another: of rewards as scores, by comparing them, or the
        reward itself is the rate of a completion."""
        completions: Literal["all", "extremes"] = "all"
        """The completions of a prompt that are learned from: all, or the best and the worst."""

    config: Config

    @property
    def source(self) -> SourceName:
        return "rollouts" if self.config.data == "sampled" else "comparisons"

    def needs(self) -> Needs:
        # Of equally good completions the first is the best, so a group keeps its order.
        return replace(super().needs(), whole_groups=self.config.completions == "extremes")

    def credit(self, batch: Batch) -> Credit:
        """``P_i - 1/2`` as advantages."""
        usable_B = grouped(batch.group_ids, usable_rows(batch))
        centred_B = np.where(usable_B, win_rates(batch, usable_B, self.config.win_rate) - 0.5, 0.0)
        if self.config.completions == "all":
            return Credit(centred_B, keep=usable_B)
        keep_B = np.zeros(len(usable_B), bool)
        keep_B[np.concatenate(best_and_worst(batch.rewards, batch.group_ids, usable_B))] = True
        return Credit(np.where(keep_B, centred_B, 0.0), keep=keep_B)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        ratios_N = self.log_ratios(tokens)
        residuals_N = ratios_N - self.config.eta * tokens.sequence_mean(tokens.advantages_T)
        return regression_loss(tokens, residuals_N.square(), ratios_N, residuals_N)


def win_rates(batch: Batch, rows: BoolArray, kind: str) -> FloatArray:
    """(B,) the win rates of the ``rows`` within their groups, themselves among the others; 0 for other rows.

    Raises:
        ValueError: Rewards that are win rates are not between 0 and 1.
    """
    rates_B = np.zeros(len(batch.rewards))
    for members in members_of(batch.group_ids, rows):
        rewards = batch.rewards[members]
        if kind == "given":
            if rewards.min() < 0 or rewards.max() > 1:
                what = f"a reward of {rewards.min() if rewards.min() < 0 else rewards.max():g} is no win rate"
                raise ValueError(f"{what}, which is from 0 to 1; set win_rate to bradley_terry or compare")
            rates_B[members] = rewards
            continue
        differences = rewards[:, None] - rewards[None, :]
        better = 1 / (1 + np.exp(-differences.clip(-500, 500)))
        if kind == "compare":
            better = np.where(np.abs(differences) <= TOLERANCE, 0.5, differences > 0)
        rates_B[members] = better.mean(1)
    return rates_B
