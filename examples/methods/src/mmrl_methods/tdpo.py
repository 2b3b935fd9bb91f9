r"""TDPO: token-level direct preference optimization (arXiv:2404.11999).

DPO with a forward KL divergence at each token. With the log-ratio ``x`` of a completion, the divergence of the
reference from the policy summed over its places, ``D = sum_t KL(pi_ref(. | y_<t) || pi(. | y_<t))``, and the logistic
function ``s``,

    tdpo1   -log s(beta (x_c - x_j - (D_j - D_c)))
    tdpo2   -log s(beta (x_c - x_j - alpha (D_j - sg(D_c))))

for a chosen and a rejected completion; the step's loss is the mean over pairs. ``variant: tdpo2`` with ``alpha`` 0.5
is the paper's choice; ``sg`` keeps the chosen's divergence from being driven up.

Deviation from the paper, and why: the paper sums ``KL`` over the whole vocabulary, which needs both distributions at
each place. A run has the log-probs of the tokens that stand there, so the divergence is estimated from these, with
the token's log-ratio ``x_t``:

    data: given      exp(x_t) - 1 - x_t                  its mean over tokens of the reference is the divergence
    data: sampled    1 - exp(-x_t) - x_t exp(-x_t)       its mean over tokens of the policy is the divergence

Both are at least 0, and equal to the second order in ``x_t``. The first is exact on average only for candidates that
the reference has written, as those of an SFT model's samples are. Tokens of the policy change with it, so the gradient
of the second one's value is not the divergence's: it gets that of ``x_t + exp(-x_t)``, ``1 - exp(-x_t)``, whose mean
over tokens of the policy is. In ``tdpo1`` with the plain estimator ``-x_t`` the
two divergences would cancel the log-ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import NotNegative, Positive

if TYPE_CHECKING:
    import torch

MAX_EXPONENT = 20.0
"""Exponents are clamped at it: a token's estimate stays finite."""


class TDPO(PairAlgorithm):
    class Config(PairAlgorithm.Config):
        variant: Literal["tdpo1", "tdpo2"] = "tdpo2"
        """The loss of a pair."""
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        alpha: NotNegative = 0.5
        """Weight of the divergences of `tdpo2`."""

    config: Config

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from torch.nn.functional import logsigmoid

        kl_N, config = self.divergences(pairs), self.config
        chosen_M, rejected_M = kl_N[pairs.chosen_M], kl_N[pairs.rejected_M]
        difference_M = rejected_M - chosen_M
        if config.variant == "tdpo2":
            difference_M = config.alpha * (rejected_M - chosen_M.detach())
        return {"preference": -logsigmoid(config.beta * (pairs.margins(pairs.log_ratios_N) - difference_M))}

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * (pairs.log_ratios_N + self.divergences(pairs))

    def divergences(self, pairs: Pairs) -> torch.Tensor:
        """(N,) estimates of ``sum_t KL(pi_ref || pi)`` from the tokens of each sequence."""
        ratio_T = pairs.tokens.log_ratio_T
        if self.config.data == "given":
            return pairs.tokens.sequence_sum(ratio_T.clamp(max=MAX_EXPONENT).exp() - 1 - ratio_T)
        weight_T = (-ratio_T).clamp(max=MAX_EXPONENT).exp()
        slope_T = ratio_T + weight_T
        value_T = 1 - weight_T - ratio_T * weight_T
        return pairs.tokens.sequence_sum(value_T.detach() + slope_T - slope_T.detach())
