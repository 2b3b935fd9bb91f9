r"""DMPO: direct multi-turn preference optimization (arXiv:2406.14868).

DPO over whole episodes, whose later turns count less. With the log-ratio ``x_t`` of the policy's tokens of turn
``t = 0..T-1`` and the logistic function ``s``, for the best and the worst episode of a prompt,

    phi(t, T) = gamma^t (1 - gamma^(T - t)) / (1 - gamma^T)
    L         = -log s(beta (sum_t phi(t, T_c) x_ct - sum_t phi(t, T_j) x_jt))

and the step's loss is the mean over pairs. ``phi`` falls from 1 at the first turn, whatever ``T`` is, so episodes of
different lengths can be compared; ``gamma: 1`` is its limit, ``(T - t) / T``. The authors' code has ``gamma`` 0.7.

Deviations from the paper, and why:

- Pairs are episodes of the policy by their rewards. The paper's are an expert's episode and one of the policy;
  candidates of a dataset have a single turn here, for which the loss is DPO's.
- Prompts whose episodes have equal rewards leave the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, RunFacts
from mmrl.ops.credit import best_and_worst
from mmrl.policy_gradient import Positive
from mmrl.types import ENVIRONMENT, Batch, Credit, FloatArray, IntArray, PackedTokens, TokenLoss
from mmrl_methods.groups import group_sums, usable_rows

if TYPE_CHECKING:
    import torch


class DMPO(Algorithm):
    class Config(PluginConfig):
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        gamma: Annotated[float, Field(gt=0, le=1)] = 0.7
        """Discount of later turns."""

    config: Config

    def needs(self) -> Needs:
        return Needs(reference_logprobs=True, min_group_size=2, whole_groups=True, turns=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def check(self, run: RunFacts) -> Sequence[str]:
        if ENVIRONMENT not in run.rewards:
            what = "dmpo compares episodes of several turns, and there is no environment"
            raise ValueError(f"{what}; name one (environment.name), or use dpo")
        return ()

    def credit(self, batch: Batch) -> Credit:
        """``phi`` of each token's turn for the best episode of a group, and its negative for the worst."""
        assert batch.turns is not None
        best_M, worst_M = best_and_worst(batch.rewards, batch.group_ids, usable_rows(batch))
        advantages: list[FloatArray] = [np.zeros(len(mask)) for mask in batch.masks]
        for sign, rows in ((1.0, best_M), (-1.0, worst_M)):
            for row in rows:
                advantages[row] = sign * weights_of(batch.turns[row], self.config.gamma)
        keep_B = np.zeros(len(advantages), bool)
        keep_B[[*best_M, *worst_M]] = True
        return Credit(advantages, keep=keep_B, metrics={"preference/pairs": float(len(best_M))})

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from torch.nn.functional import logsigmoid

        signed_N = tokens.sequence_sum(tokens.advantages_T * tokens.log_ratio_T)
        margins_N = self.config.beta * group_sums(tokens, signed_N)
        loss_T = -logsigmoid(margins_N)[tokens.sequence_T]
        return TokenLoss(loss_T, {"preference": loss_T}, sequence_metrics=_metrics(margins_N.detach()))


def _metrics(margins_N: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"preference/margin": margins_N, "preference/accuracy": 0.5 * (1 + margins_N.sign())}


def weights_of(turns: IntArray, gamma: float) -> FloatArray:
    """(T_i,) ``phi`` of the turn of each token."""
    number = int(turns.max()) + 1
    left = number - np.asarray(turns, np.float64)
    if gamma == 1:
        return left / number
    return np.asarray(gamma**turns * (1 - gamma**left) / (1 - gamma**number), np.float64)
