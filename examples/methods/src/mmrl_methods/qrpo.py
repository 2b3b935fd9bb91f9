r"""QRPO: quantile reward policy optimization (arXiv:2507.08068).

The reward of a completion is replaced by its quantile among the rewards of the reference's completions of the prompt.
Under the reference quantiles are uniform, so the partition function of the best policy is known, and each completion
has a regression target of its own, without a pair and without a baseline:

    q_i = P(R(y') <= R_i), y' of the reference
    x_i = sum_t (log pi(y_it) - log pi_ref(y_it))
    L_i = (f(q_i) - beta log Z - beta x_i)^2,    Z = E exp(f(u) / beta), u uniform on (0, 1)

and the step's loss is the mean over completions. ``transform`` names ``f``:

    identity   f(q) = q             log Z = log(beta) + 1/beta + log(1 - exp(-1/beta))
    log        f(q) = log(q)        log Z = log(beta / (1 + beta))
    normal     f(q) = Phi^-1(q)     log Z = 1 / (2 beta^2)

``data: given`` takes the candidates of the dataset with their scores: as in the paper, where the reference has
sampled them. ``data: sampled`` takes groups of the policy. Their quantiles are those of the policy, which is the
reference's at the start and after each ``reference.reset_every``.

Deviations from the paper and its code, and why:

- ``q_i`` is the share of the prompt's other completions whose reward is no higher. The paper has a sample of the
  reference's beside the completions that it learns from; a completion is no sample of what it is compared with.
- For ``log`` and ``normal`` quantiles are kept ``1/(2n)`` away from 0, and for ``normal`` from 1 too, with ``n``
  others: the authors' code has ``1/n``, which is no bound for a pair.
- For ``identity`` the authors' code leaves out ``log(1 - exp(-1/beta))``, which is -4.5e-5 for ``beta`` 0.1.
- The authors' ``scaled-normal-icdf`` is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.interfaces import SourceName
from mmrl.ops.credit import TOLERANCE, grouped, members_of
from mmrl.types import Batch, BoolArray, Credit, FloatArray, PackedTokens, TokenLoss
from mmrl_methods.groups import usable_rows
from mmrl_methods.regression import Regression, regression_loss

Transform = Literal["identity", "log", "normal"]
FUNCTIONS: dict[Transform, Callable[[float], float]] = {
    "identity": float,
    "log": math.log,
    "normal": NormalDist().inv_cdf,
}


class QRPO(Regression):
    class Config(Regression.Config):
        against: Literal["reference"] = "reference"
        """Only the reference: the quantiles are those of its completions."""
        data: Literal["given", "sampled"] = "sampled"
        """The dataset's own candidates with their scores, or groups that the policy samples and rewards score."""
        beta: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.1
        """Weight of the KL penalty: the greater, the nearer the policy stays to the reference."""
        transform: Transform = "identity"
        """The function of a quantile that is the reward."""

    config: Config

    @property
    def source(self) -> SourceName:
        return "rollouts" if self.config.data == "sampled" else "comparisons"

    def credit(self, batch: Batch) -> Credit:
        """The targets ``f(q) - beta log Z`` as advantages."""
        config, keep_B = self.config, grouped(batch.group_ids, usable_rows(batch))
        quantiles_B = quantiles(batch, keep_B, both=config.transform == "normal", away=config.transform != "identity")
        function, offset = FUNCTIONS[config.transform], config.beta * log_partition(config.transform, config.beta)
        targets_B = np.zeros(len(keep_B))
        targets_B[keep_B] = [function(q) - offset for q in quantiles_B[keep_B]]
        metrics = {"qrpo/quantile": float(quantiles_B[keep_B].mean())} if keep_B.any() else {}
        return Credit(targets_B, keep=keep_B, metrics=metrics)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        ratios_N = self.log_ratios(tokens)
        residuals_N = tokens.sequence_mean(tokens.advantages_T) - self.config.beta * ratios_N
        return regression_loss(tokens, residuals_N.square(), ratios_N, residuals_N)


def quantiles(batch: Batch, rows: BoolArray, *, away: bool, both: bool) -> FloatArray:
    """(B,) shares of the other ``rows`` of each row's group whose reward is no higher; 0 for others.

    Args:
        away: True to keep them ``1/(2n)`` away from 0, with ``n`` others; ``both`` from 1 too.
    """
    quantiles_B = np.zeros(len(batch.rewards))
    for members in members_of(batch.group_ids, rows):
        rewards, others = batch.rewards[members], len(members) - 1
        not_higher = (rewards[None, :] <= rewards[:, None] + TOLERANCE).sum(1) - 1
        low, high = 1 / (2 * others) if away else 0.0, 1 - 1 / (2 * others) if both else 1.0
        quantiles_B[members] = (not_higher / others).clip(low, high)
    return quantiles_B


def log_partition(transform: Transform, beta: float) -> float:
    """``log Z`` of a transform, the logarithm of the mean of ``exp(f(u) / beta)`` over uniform ``u``."""
    if transform == "log":
        return math.log(beta / (1 + beta))
    if transform == "normal":
        return 1 / (2 * beta**2)
    if beta > 1:  # where the sum below would cancel
        return math.log(beta * math.expm1(1 / beta))
    return math.log(beta) + 1 / beta + math.log1p(-math.exp(-1 / beta))
