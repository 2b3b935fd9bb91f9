r"""SAPO: soft adaptive policy optimization (arXiv:2511.20347).

A smooth gate in place of the clip:

    A_i  = (R_i - mean(R)) / (std(R) + eps)
    tau  = tau_positive if A_i > 0, else tau_negative
    L_it = -A_i 4/tau sigmoid(tau (rho - 1))
    L    = 1/G sum_i 1/|y_i| sum_t L_it,  no KL

On-policy (``rho = 1``) its gradient is that of GRPO; away from it the gradient fades instead of stopping, faster the
larger ``tau``. Tokens of negative advantage fade faster, since they push up probabilities all over the vocabulary.
"""

from __future__ import annotations

from mmrl.interfaces import AggregationMode
from mmrl.policy_gradient import GroupRelative, Positive
from mmrl.types import PackedTokens, TokenLoss


class SAPO(GroupRelative):
    class Config(GroupRelative.Config):
        tau_positive: Positive = 1.0
        """Steepness of the gate for positive advantages."""
        tau_negative: Positive = 1.05
        """Steepness of the gate for the others."""
        aggregation: AggregationMode = "seq-mean-token-mean"
        """The average over per-token losses."""

    config: Config

    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.surrogate import soft_gate

        return soft_gate(tokens, tau_positive=self.config.tau_positive, tau_negative=self.config.tau_negative)
