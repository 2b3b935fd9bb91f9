r"""RRHF: rank responses to align (arXiv:2304.05302).

The policy's mean log-probs of a prompt's completions are to stand in the order of their scores ``R``. With
``p_i = (sum_t log pi(y_it)) / |y_i|^length_penalty`` and the best completion ``b``,

    L_rank = sum_{R_i < R_j} max(0, p_i - p_j)
    L_nll  = -sum_t log pi(y_bt)
    L      = rank_weight L_rank + L_nll

and the step's loss is the mean over prompts. No reference policy is loaded, and nothing holds the policy near one.

``nll: mean`` is ``-p_b`` with ``length_penalty`` 1, and ``rank_weight: 100`` goes with it in the authors' code. The
defaults are the paper's equations.

``data: given`` compares the dataset's candidates by their scores, any number of them; ``data: sampled`` completions
of the policy by their rewards.

Deviations from the paper, and why:

- A prompt whose scores are all equal has no order, and leaves the loss; of equally good best ones the first is ``b``.
- The mean is over completions, each loss times the number of its prompt's completions: the mean over prompts where
  these numbers are equal.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, SourceName
from mmrl.ops.credit import best_and_worst
from mmrl.policy_gradient import NotNegative, Positive
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_methods.groups import group_sizes, usable_rows


class RRHF(Algorithm):
    class Config(PluginConfig):
        data: Literal["given", "sampled"] = "given"
        """The dataset's own candidates with their scores, or groups that the policy samples and rewards score."""
        rank_weight: Positive = 1.0
        """Weight of the ranking loss."""
        length_penalty: NotNegative = 1.0
        """Power of the length by which a completion's log-prob is divided."""
        nll: Literal["sum", "mean"] = "sum"
        """The best completion's negative log-prob, or its mean over tokens."""

    config: Config

    @property
    def source(self) -> SourceName:
        return "rollouts" if self.config.data == "sampled" else "comparisons"

    def needs(self) -> Needs:
        return Needs(min_group_size=2, whole_groups=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def credit(self, batch: Batch) -> Credit:
        """1 for a group's best row and 0 for the others; groups without an order leave the loss."""
        usable_B = usable_rows(batch)
        best_M, _ = best_and_worst(batch.rewards, batch.group_ids, usable_B)
        advantages_B = np.zeros(len(usable_B))
        advantages_B[best_M] = 1.0
        return Credit(advantages_B, keep=usable_B & np.isin(batch.group_ids, batch.group_ids[best_M]))

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        import torch

        config = self.config
        sums_N = tokens.sequence_sum(tokens.logprobs_T)
        lengths_N = tokens.sequence_sum(tokens.mask_T.to(sums_N)).clamp(min=1)
        scores_N = sums_N / lengths_N**config.length_penalty
        better_NN = tokens.score_N[None, :] > tokens.score_N[:, None]
        pairs_NN = better_NN & (tokens.group_N[None, :] == tokens.group_N[:, None])
        gaps_NN = (scores_N[:, None] - scores_N[None, :]).clamp(min=0)
        rank_N = config.rank_weight * torch.where(pairs_NN, gaps_NN, torch.zeros_like(gaps_NN)).sum(1)
        is_best_N = tokens.sequence_mean(tokens.advantages_T) > 0
        likelihood_N = torch.where(is_best_N, sums_N if config.nll == "sum" else sums_N / lengths_N, 0.0)
        sizes_N = group_sizes(tokens, sums_N)
        terms = {
            "rank": (sizes_N * rank_N)[tokens.sequence_T],
            "nll": (-sizes_N * likelihood_N)[tokens.sequence_T],
        }
        wrong_N = (pairs_NN & (gaps_NN > 0)).sum(1).to(sums_N)
        metrics = {"rrhf/misranked": wrong_N, "preference/logprob_mean": (sums_N / lengths_N).detach()}
        return TokenLoss(terms["rank"] + terms["nll"], terms, sequence_metrics=metrics)
