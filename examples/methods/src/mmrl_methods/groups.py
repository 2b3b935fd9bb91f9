"""Losses of sequences that look at the other sequences of their group.

Letters: ``N`` sequences of a micro-batch, ``B`` rows of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig
from mmrl.ops.credit import group_advantages, grouped
from mmrl.types import Batch, BoolArray, Credit, PackedTokens

if TYPE_CHECKING:
    import torch


def usable_rows(batch: Batch) -> BoolArray:
    """(B,) True for valid rows with a token that the policy wrote."""
    has_tokens_B = np.array([mask.any() for mask in batch.masks], bool)
    return np.asarray(batch.valid & has_tokens_B, bool)


def group_sums(tokens: PackedTokens, values_N: torch.Tensor) -> torch.Tensor:
    """(N,) the sum of the values in the group of each sequence; the groups are whole with ``Needs.whole_groups``."""
    groups, place_N = tokens.group_N.unique(return_inverse=True)
    sums: torch.Tensor = values_N.new_zeros(len(groups)).index_add(0, place_N, values_N)[place_N]
    return sums


def group_sizes(tokens: PackedTokens, values_N: torch.Tensor) -> torch.Tensor:
    """(N,) the number of sequences in the group of each sequence, of the type of the values."""
    return group_sums(tokens, values_N.new_ones(tokens.num_sequences))


def group_means(tokens: PackedTokens, values_N: torch.Tensor) -> torch.Tensor:
    """(N,) the mean of the values in the group of each sequence."""
    return group_sums(tokens, values_N) / group_sizes(tokens, values_N)


class GroupRegression(Algorithm):
    """Base of algorithms that regress log-ratios of completions on rewards, within groups.

    The rows that enter the loss are all usable ones of groups with two or more. Their advantages are rewards less the
    mean of the group. The loss of a sequence stands on each of its tokens, and the step's is the mean over sequences.
    """

    min_group_size: ClassVar[int] = 2

    class Config(PluginConfig):
        against: Literal["old", "reference"] = "old"
        """The policy that log-ratios are taken from: the one before the step, or the reference."""

    config: Config

    def needs(self) -> Needs:
        from_reference = self.config.against == "reference"
        return Needs(reference_logprobs=from_reference, min_group_size=self.min_group_size, whole_groups=True)

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("seq-mean-token-mean")

    def credit(self, batch: Batch) -> Credit:
        keep_B = grouped(batch.group_ids, usable_rows(batch))
        return Credit(group_advantages(batch.rewards, batch.group_ids, keep_B, scale="none"), keep=keep_B)

    def log_ratios(self, tokens: PackedTokens) -> torch.Tensor:
        """(N,) ``sum_t (log pi(y_t) - log pi'(y_t))`` with gradient, of the policy that ``against`` names."""
        if self.config.against == "reference":
            return tokens.sequence_sum(tokens.log_ratio_T)
        return tokens.sequence_sum(tokens.logprobs_T - tokens.old_logprobs_T.detach())


def regression_metrics(ratios_N: torch.Tensor, residuals_N: torch.Tensor) -> dict[str, Any]:
    """``regression/log_ratio`` and ``regression/residual_abs``: means over sequences of the log-ratio, and of the size
    of what is left to fit."""
    return {"regression/log_ratio": ratios_N.detach(), "regression/residual_abs": residuals_N.detach().abs()}
