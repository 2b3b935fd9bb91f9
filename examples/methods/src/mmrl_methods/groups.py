"""Rows and sequences of groups, in ``credit`` and in ``loss``.

Letters: ``N`` sequences of a micro-batch, ``B`` rows of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmrl.types import Batch, BoolArray, PackedTokens, Rollout

if TYPE_CHECKING:
    import torch


def usable_rows(batch: Batch) -> BoolArray:
    """(B,) True for valid rows with a token that the policy wrote."""
    has_tokens_B = np.array([mask.any() for mask in batch.masks], bool)
    return np.asarray(batch.valid & has_tokens_B, bool)


def own_turns(rollout: Rollout) -> range:
    """Turns of an episode before which nothing was shared with one that it goes on from, so that each counts once."""
    first = 0 if rollout.branch is None else rollout.branch.turn + 1
    return range(first, len(rollout.episode))


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
