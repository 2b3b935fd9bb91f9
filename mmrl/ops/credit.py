"""Advantages from rewards: pure functions of a whole rollout batch, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mmrl.types import BoolArray, FloatArray, IntArray

TOLERANCE = 1e-8
"""Rewards of a group whose range is at most this carry no signal. A test of the range, not of the standard
deviation: seven float32 rewards of 0.7 have a std of 6e-8, which a small epsilon would blow up."""


def group_advantages(
    rewards: FloatArray,
    group_ids: IntArray,
    valid: BoolArray,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> FloatArray:
    """(B,) float64 rewards relative to their group's mean, divided by a standard deviation plus ``eps``.

    Invalid rows, groups of one, and groups of equal rewards get exactly 0.

    Args:
        rewards: (B,) any finite values; those of invalid rows are ignored.
        group_ids: (B,) in any order.
        scale: ``group`` divides by the group's deviation (arXiv:2402.03300 section 4.1.2), ``batch`` by that of
            all valid rewards, ``none`` not at all (arXiv:2503.20783).
        ddof: 1 for the sample's deviation, 0 for the population's.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages_B = np.zeros_like(rewards)
    batch_std = _std(rewards[valid], ddof) if scale == "batch" else 0.0
    for group_id in np.unique(group_ids[valid]):
        members = valid & (group_ids == group_id)
        values = rewards[members]
        if np.ptp(values) <= TOLERANCE:
            continue
        centred = values - values.mean()
        std = {"group": _std(values, ddof), "batch": batch_std, "none": 1.0}[scale]
        advantages_B[members] = centred if scale == "none" else centred / (std + eps)
    return advantages_B


def zero_signal_fraction(rewards: FloatArray, group_ids: IntArray, valid: BoolArray) -> float:
    """Share of the groups with a valid reward whose valid rewards are all equal (groups of one included)."""
    groups = [rewards[valid & (group_ids == g)] for g in np.unique(group_ids[valid])]
    return float(np.mean([np.ptp(values) <= TOLERANCE for values in groups])) if groups else 1.0


def sequence_kl(
    logprobs: Sequence[FloatArray], reference_logprobs: Sequence[FloatArray], masks: Sequence[BoolArray]
) -> FloatArray:
    """(B,) float64 sums of ``log pi - log pi_ref`` over each row's tokens in the loss (the k1 estimator)."""
    return np.array(
        [
            np.sum(np.asarray(new, np.float64)[mask] - np.asarray(reference, np.float64)[mask])
            for new, reference, mask in zip(logprobs, reference_logprobs, masks, strict=True)
        ],
        np.float64,
    )


def _std(values: FloatArray, ddof: int) -> float:
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0
