r"""ORPO: odds ratio preference optimization, supervised learning and a preference in one (arXiv:2403.07691).

With the mean log-prob of a completion's tokens ``m = 1/n sum_t log pi(y_t)``, its odds ``exp(m) / (1 - exp(m))`` and
the logistic function ``s``, a pair's loss is

    L = -m_c - lam log s(log odds_c - log odds_j)

and the step's is the mean over pairs. No reference policy is loaded. ``data`` is as in ``dpo``.

Where implementations disagree: the first term is of the chosen completion alone; TRL's goes over the prompt too. The
odds of a certain completion are infinite: ``m`` is at most -1e-6 there, and ``log(1 - exp(m))`` is exact near 0, where
``log1p(-exp(m))`` loses all digits. Rewards in metrics are ``lam m``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import Positive

if TYPE_CHECKING:
    import torch


class ORPO(PairAlgorithm):
    has_reference = False

    class Config(PairAlgorithm.Config):
        lam: Positive = 0.1
        """Weight of the odds ratio."""

    config: Config

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from mmrl_algorithms.preference import odds_ratio

        chosen_M, rejected_M = (pairs.mean_logprobs_N[places] for places in (pairs.chosen_M, pairs.rejected_M))
        return {"nll": -chosen_M, "preference": self.config.lam * odds_ratio(chosen_M, rejected_M)}

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.lam * pairs.mean_logprobs_N
