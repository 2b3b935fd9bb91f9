"""Metrics that preferences have in common: means over the better and over the worse completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.types import PackedTokens

if TYPE_CHECKING:
    import torch


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
