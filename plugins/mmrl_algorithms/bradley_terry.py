r"""Bradley-Terry: a reward model, a network with a score in place of words, learned from comparisons.

With the score ``s`` of a prompt with a completion, read after its last token, and the logistic function ``sigma``, the
loss of a better and a worse completion of one prompt is

    L = -log sigma(s_c - s_j - m) + centre (s_c + s_j)^2

It is the mean over all ordered pairs of a prompt, and then over prompts: of a graded set of K completions up to
``K (K - 1) / 2`` pairs (InstructGPT, arXiv:2203.02155), whose scores are computed once. Equal grades are no pair. A
prompt without an order is left out, and counted: ``preference/ties``.

``m`` is 0, or with ``margin: true`` the difference of the dataset's scores (Llama 2, arXiv:2307.09288): pairs that
differ much are driven further apart. The loss of differences alone leaves a constant open. ``centre`` holds the scores
of a pair around 0 (arXiv:2312.09244), so that they may serve as rewards.

Where implementations disagree:

- Two terms are called centring, ``(s_c + s_j)^2`` and ``s_c^2 + s_j^2``; the second one also shrinks differences. Here
  it is the first one, as in the paper and in TRL, whose default is none.
- The margin is ignored by some, and ``log(1 + exp(-d))`` overflows where it is written out; it is ``logsigmoid`` here.
- A mean over all pairs of a batch counts a prompt of nine completions 36 times. Here each prompt counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.ops.pairs import ordered_credit
from mmrl.policy_gradient import NotNegative
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss

if TYPE_CHECKING:
    import torch


class BradleyTerry(Algorithm):
    source, network = "comparisons", "reward"

    class Config(PluginConfig):
        margin: bool = False
        """Ask each pair for the difference of the dataset's scores, and not for the right order alone."""
        centre: NotNegative = 0.01
        """Weight of the square of a pair's sum of scores, which holds them around 0; 0 is none."""

    config: Config

    def needs(self) -> Needs:
        return Needs(min_group_size=2, whole_groups=True, last_state=True)

    @property
    def aggregation(self) -> Aggregation:
        """Each prompt counts once: its loss stands on every token of its completions."""
        return Aggregation("prompt-mean-token-mean")

    def credit(self, batch: Batch) -> Credit:
        """1 for a group's best row, -1 for its worst, 0 for those between; groups without an order leave the loss."""
        return ordered_credit(batch, keep_between=True)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl_algorithms.preference import bradley_terry

        pairs, scores_N = OrderedPairs(tokens), tokens.final_values_N
        assert scores_N is not None, "this algorithm trains a network with a score"
        chosen_M, rejected_M = scores_N[pairs.chosen_M], scores_N[pairs.rejected_M]
        margin_M = tokens.score_N[pairs.chosen_M] - tokens.score_N[pairs.rejected_M] if self.config.margin else 0.0
        terms = {"preference": pairs.on_tokens(bradley_terry(chosen_M, rejected_M, margin_M))}
        if self.config.centre:
            terms["centre"] = pairs.on_tokens(self.config.centre * (chosen_M + rejected_M) ** 2)
        difference_M = (chosen_M - rejected_M).detach()
        length_N = tokens.sequence_sum(tokens.mask_T.to(scores_N))
        metrics = {
            "accuracy": 0.5 * (1 + difference_M.sign()),
            "margin": difference_M,
            "score_chosen": chosen_M.detach(),
            "score_rejected": rejected_M.detach(),
            "length_chosen": length_N[pairs.chosen_M],
            "length_rejected": length_N[pairs.rejected_M],
        }
        first, *others = terms.values()
        return TokenLoss(
            sum(others, first),
            terms,
            sequence_metrics={f"preference/{name}": pairs.on_best(values_M) for name, values_M in metrics.items()},
        )


def _ordered_pairs(tokens: PackedTokens) -> Iterator[tuple[int, int]]:
    """Places of a better and of a worse sequence of each ordered pair of a group."""
    scores, members = tokens.score_N.tolist(), dict[int, list[int]]()
    for place, group in enumerate(tokens.group_N.tolist()):
        members.setdefault(group, []).append(place)
    for places in members.values():
        yield from (pair for pair in permutations(places, 2) if scores[pair[0]] > scores[pair[1]])


class OrderedPairs:
    """All ordered pairs of each group of a micro-batch. Letters: ``N`` sequences, ``M`` pairs, ``G`` groups.

    Attributes:
        chosen_M: Each pair's sequence with the higher score, likewise ``rejected_M``.
    """

    def __init__(self, tokens: PackedTokens) -> None:
        self._tokens = tokens
        self._best_G, _ = tokens.pairs()
        self._groups_G, self._group_N = tokens.group_N.unique(return_inverse=True)
        self.chosen_M, self.rejected_M = tokens.group_N.new_tensor(list(_ordered_pairs(tokens))).reshape(-1, 2).T

    def on_tokens(self, values_M: torch.Tensor) -> torch.Tensor:
        """(T,) the mean over a group's pairs, on every token of the group."""
        return self._means(values_M)[self._group_N][self._tokens.sequence_T]

    def on_best(self, values_M: torch.Tensor) -> torch.Tensor:
        """(N,) the mean over a group's pairs, on its best sequence; NaN elsewhere."""
        nothing_N = values_M.new_full((self._tokens.num_sequences,), np.nan)
        return nothing_N.index_copy(0, self._best_G, self._means(values_M)[self._group_N[self._best_G]])

    def _means(self, values_M: torch.Tensor) -> torch.Tensor:
        """(G,) the mean over each group's pairs."""
        group_M, nothing_G = self._group_N[self.chosen_M], values_M.new_zeros(len(self._groups_G))
        sums_G = nothing_G.index_add(0, group_M, values_M)
        return sums_G / nothing_G.index_add(0, group_M, values_M.new_ones(len(group_M)))
