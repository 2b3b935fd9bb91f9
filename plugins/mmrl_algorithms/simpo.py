r"""SimPO: simple preference optimization with a reward that needs no reference (arXiv:2405.14734).

With the mean log-prob of a completion's tokens ``m = 1/n sum_t log pi(y_t)`` and the logistic function ``s``, a pair's
loss is

    L = -log s(beta (m_c - m_j) - gamma)

and the step's is the mean over pairs. ``gamma`` is the paper's: it is not divided by ``beta``. No reference policy is
loaded. ``data`` is as in ``dpo``.

Where implementations disagree: TRL adds the chosen's negative log-likelihood unless ``cpo_alpha`` is 0; here there is
no such term. The authors' code takes ``gamma / beta`` as its option. Rewards in metrics are ``beta m``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import NotNegative, Positive

if TYPE_CHECKING:
    import torch


class SimPO(PairAlgorithm):
    has_reference = False

    class Config(PairAlgorithm.Config):
        beta: Positive = 2.5
        """Weight of the mean log-probs."""
        gamma: NotNegative = 1.375
        """The margin that is asked for; the paper has it between 0.3 and 1.6 times `beta`."""

    config: Config

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from mmrl_algorithms.preference import simpo

        means_N, config = pairs.mean_logprobs_N, self.config
        chosen_M, rejected_M = means_N[pairs.chosen_M], means_N[pairs.rejected_M]
        return {"preference": simpo(chosen_M, rejected_M, beta=config.beta, gamma=config.gamma)}

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * pairs.mean_logprobs_N
