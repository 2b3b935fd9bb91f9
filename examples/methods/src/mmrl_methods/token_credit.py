"""Rewards of tokens: values of parts of the text, and of rewards that are about the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmrl.ops.credit import token_rewards
from mmrl.types import Batch, BoolArray, FloatArray


def rewards_of_tokens(batch: Batch, outcome: Sequence[str], masks: Sequence[BoolArray]) -> list[FloatArray]:
    """B arrays (T_i,): ``Batch.token_rewards``, and at the last token in the mask the weighted sum of components.

    A value at a token outside the mask, such as the end of a part that an environment wrote, is left out.

    Args:
        outcome: Components of the whole completion; one that does not apply to a row counts as 0.
        masks: False throughout for rows that are not valid.
    """
    assert batch.token_rewards is not None, "the algorithm's needs ask for no token rewards"
    whole_B = np.zeros(len(batch.rewards))
    for name in outcome:
        values_B = np.where(batch.valid, batch.component(name), np.nan)
        whole_B += batch.weights.get(name, 1.0) * np.where(np.isnan(values_B), 0.0, values_B)
    rows = zip(batch.token_rewards, token_rewards(whole_B, masks), masks, strict=True)
    return [np.where(mask, given_T, 0.0) + end_T for given_T, end_T, mask in rows]


def check_outcome(outcome: Sequence[str], rewards: Sequence[str]) -> None:
    """Refuse components that a run does not have.

    Raises:
        ValueError: There is one.
    """
    if missing := [name for name in outcome if name not in rewards]:
        raise ValueError(f"outcome names {', '.join(missing)}, and the rewards are {', '.join(rewards)}")
