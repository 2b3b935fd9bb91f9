r"""R-DPO: DPO with a penalty of length (arXiv:2403.19159).

The reward that is maximised, less the KL penalty, is ``r(y) - alpha |y|``. The best policy then has
``r(y) = beta x + alpha |y|`` up to a constant of the prompt, with the log-ratio
``x = sum_t (log pi(y_t) - log pi_ref(y_t))``, so the loss of a chosen and a rejected completion is, with the logistic
function ``s``,

    L = -log s(beta (x_c - x_j) + alpha (|y_c| - |y_j|))

and the step's is the mean over pairs. Where the chosen is the longer one, less is asked of the log-ratios. ``alpha:
0`` is DPO.

``data`` is that of the frame: the dataset's candidates with their scores, or completions of the policy with rewards.

Deviations from the paper: lengths are tokens that the policy wrote, with the end of the turn. ``alpha`` is chosen
here; the paper tunes it for each dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.ops.pairs import PairAlgorithm, Pairs
from mmrl.policy_gradient import NotNegative, Positive

if TYPE_CHECKING:
    import torch


class RDPO(PairAlgorithm):
    class Config(PairAlgorithm.Config):
        beta: Positive = 0.1
        """Weight of the log-ratio: the greater, the nearer the policy stays to the reference."""
        alpha: NotNegative = 0.01
        """Reward that each token costs."""

    config: Config

    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        from torch.nn.functional import logsigmoid

        lengths_N = pairs.tokens.sequence_sum(pairs.tokens.mask_T.to(pairs.tokens.logprobs_T))
        longer_M = self.config.alpha * pairs.margins(lengths_N)
        return {"preference": -logsigmoid(self.config.beta * pairs.margins(pairs.log_ratios_N) + longer_M)}

    def rewards(self, pairs: Pairs) -> torch.Tensor:
        return self.config.beta * pairs.log_ratios_N
