"""The frame of algorithms that compare two completions of a prompt.

An algorithm defines the loss of a pair, and the rewards that the policy gives completions by it. The frame adds the
rest: the source of the data, the pairs, the step's loss, and metrics. The best and the worst row of each group are a
pair. Its loss stands on every token of both, and with ``seq-mean-token-mean`` the step's loss is the mean over pairs,
for any packing.

An algorithm that needs none of this may implement ``mmrl.interfaces.Algorithm`` itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, SourceName
from mmrl.ops.credit import best_and_worst
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch. Letters: ``N`` sequences, ``M`` pairs.

    Attributes:
        chosen_M: Each pair's sequence with the higher score, likewise ``rejected_M``.
    """

    tokens: PackedTokens
    chosen_M: torch.Tensor
    rejected_M: torch.Tensor

    @cached_property
    def mean_logprobs_N(self) -> torch.Tensor:
        """Their means over tokens."""
        return self.tokens.sequence_mean(self.tokens.logprobs_T)

    @cached_property
    def log_ratios_N(self) -> torch.Tensor:
        """Log-ratios of policy and reference of whole completions."""
        return self.tokens.sequence_sum(self.tokens.log_ratio_T)

    @cached_property
    def mean_log_ratios_N(self) -> torch.Tensor:
        """Their means over tokens."""
        return self.tokens.sequence_mean(self.tokens.log_ratio_T)

    @property
    def score_differences_M(self) -> torch.Tensor:
        """The chosen's score less the rejected's."""
        return self.margins(self.tokens.score_N)

    def margins(self, values_N: torch.Tensor) -> torch.Tensor:
        """(M,) the chosen's value less the rejected's."""
        return values_N[self.chosen_M] - values_N[self.rejected_M]

    def members(self, places: torch.Tensor) -> torch.Tensor:
        """(N,) bool, True for the sequences at these places."""
        nothing_N = self.tokens.sequence_T.new_zeros(self.tokens.num_sequences)
        return nothing_N.index_fill(0, places, 1).bool()

    def on_tokens(self, values_M: torch.Tensor) -> torch.Tensor:
        """(T,) each pair's value on every token of both."""
        values_N = values_M.new_zeros(self.tokens.num_sequences)
        both = values_N.index_add(0, self.chosen_M, values_M).index_add(0, self.rejected_M, values_M)
        return both[self.tokens.sequence_T]


def ordered_credit(batch: Batch, *, keep_between: bool) -> Credit:
    """1 for a group's best row, -1 for its worst, and 0 for the rest; groups without an order leave the loss.

    Args:
        keep_between: True to keep the rows of a group that are neither; they else leave the loss too.
    """
    usable_B = batch.valid & np.array([mask.any() for mask in batch.masks], bool)
    best_M, worst_M = best_and_worst(batch.rewards, batch.group_ids, usable_B)
    advantages_B = np.zeros(len(batch.masks))
    advantages_B[best_M], advantages_B[worst_M] = 1.0, -1.0
    ties = len(np.unique(batch.group_ids[usable_B])) - len(best_M)
    keep_B = usable_B & np.isin(batch.group_ids, batch.group_ids[best_M]) if keep_between else advantages_B != 0
    return Credit(advantages_B, keep=keep_B, metrics={"preference/ties": float(ties)})


class PairAlgorithm(Algorithm):
    """Base of algorithms whose loss is one of pairs.

    Attributes:
        has_reference: True if the loss compares policy and reference.
    """

    has_reference: ClassVar[bool] = True

    class Config(PluginConfig):
        data: Literal["given", "sampled"] = "given"
        """The dataset's own candidates with their scores, or groups that the policy samples and rewards score."""

    config: Config

    @abstractmethod
    def losses(self, pairs: Pairs) -> Mapping[str, torch.Tensor]:
        """The parts of the loss by name, (M,) each."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> torch.Tensor:
        """(N,) the rewards that the policy gives the completions, as the loss compares them."""

    @property
    def source(self) -> SourceName:
        return "rollouts" if self.config.data == "sampled" else "comparisons"

    def needs(self) -> Needs:
        return Needs(reference_logprobs=self.has_reference, min_group_size=2, whole_groups=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def credit(self, batch: Batch) -> Credit:
        """1 for a group's best row and -1 for its worst; all others leave the loss, as do groups without an order."""
        return ordered_credit(batch, keep_between=False)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        pairs = Pairs(tokens, *tokens.pairs())
        terms = {name: pairs.on_tokens(values_M) for name, values_M in self.losses(pairs).items()}
        first, *others = terms.values()
        return TokenLoss(sum(others, first), terms, sequence_metrics=self._sequence_metrics(pairs))

    def _sequence_metrics(self, pairs: Pairs) -> dict[str, torch.Tensor]:
        """Values of each pair, on its chosen sequence, and of each of its sequences apart; NaN elsewhere."""
        import torch

        rewards_N = self.rewards(pairs).detach()
        margin_M, on_chosen_N = pairs.margins(rewards_N), torch.full_like(rewards_N, torch.nan)
        chosen_N, rejected_N = pairs.members(pairs.chosen_M), pairs.members(pairs.rejected_M)
        return {
            "preference/accuracy": on_chosen_N.index_copy(0, pairs.chosen_M, 0.5 * (1 + margin_M.sign())),
            "preference/margin": on_chosen_N.index_copy(0, pairs.chosen_M, margin_M),
            **side_metrics(pairs.tokens, rewards_N, chosen_N, rejected_N),
        }


def side_metrics(
    tokens: PackedTokens, rewards_N: torch.Tensor, chosen_N: torch.Tensor, rejected_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``preference/reward_chosen``, ``logprob_chosen``, ``length_chosen``, and the same of the rejected: (N,) values of
    a side's sequences, NaN elsewhere.

    Args:
        rewards_N: (N,) rewards that the policy gives the sequences.
        chosen_N: (N,) bool, True for the better sequences; likewise ``rejected_N`` for the worse ones.
    """
    values = {
        "reward": rewards_N,
        "logprob": tokens.sequence_sum(tokens.logprobs_T),
        "length": tokens.sequence_sum(tokens.mask_T.to(tokens.logprobs_T)),
    }
    sides = {"chosen": chosen_N, "rejected": rejected_N}
    return {
        f"preference/{name}_{side}": values_N.detach().where(places_N, values_N.new_tensor(float("nan")))
        for name, values_N in values.items()
        for side, places_N in sides.items()
    }
