"""Advantages from rewards: pure functions of a whole rollout batch, in float64; rows and groups in any order.

Shape letters: ``B`` rollouts in the batch, ``T_i`` completion tokens of row ``i``. ``masks`` are False where a token
was not written by the policy. Such holes are skipped: they are not counted and end nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from mmrl.types import Batch, BoolArray, FloatArray, IntArray

TOLERANCE = 1e-8
"""Rewards of a group whose range is at most this carry no signal. A test of the range, not of the standard
deviation: seven float32 rewards of 0.7 have a std of 6e-8, which a small epsilon would blow up."""


def shaped_rewards(batch: Batch, *, clip: tuple[float, float] | None = None, normalise: bool = False) -> FloatArray:
    """(B,) weighted sums of the rewards' components, shaped in this order; 0 where invalid.

    A component that is NaN in a valid row does not apply to that row's prompt: it is left out of the sum.

    1. Each component relative to its group's mean and deviation, if ``normalise`` (arXiv:2601.05242, which then
       whitens the sum over the batch; that is left to the estimator).
    2. The weighted sum of all that are no penalties.
    3. Clipped to ``clip``.
    4. The weighted penalties.
    """
    if clip is None and not normalise:
        return np.where(batch.valid, batch.rewards, 0.0)

    def value(name: str) -> FloatArray:
        component = batch.components[name]
        plain = not normalise or name in batch.penalties
        return component if plain else group_advantages(component, batch.group_ids, batch.valid & ~np.isnan(component))

    return np.where(batch.valid, _shaped(batch, {name: value(name) for name in batch.components}, clip), 0.0)


def greedy_rewards(batch: Batch, *, clip: tuple[float, float] | None = None) -> FloatArray:
    """(B,) rewards of the greedy rollout of each row's prompt, shaped as ``shaped_rewards`` does; 0 where invalid."""
    assert batch.greedy_components is not None, "the algorithm's needs ask for no greedy rollout"
    return np.where(batch.valid, _shaped(batch, batch.greedy_components, clip), 0.0)


def group_advantages(
    rewards: FloatArray,
    group_ids: IntArray,
    valid: BoolArray,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> FloatArray:
    """(B,) rewards relative to their group's mean, divided by a standard deviation plus ``eps``.

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
    for members in _groups(rewards, group_ids, valid, uneven=True):
        values = rewards[members]
        centred = values - values.mean()
        std = {"group": _std(values, ddof), "batch": batch_std, "none": 1.0}[scale]
        advantages_B[members] = centred if scale == "none" else centred / (std + eps)
    return advantages_B


def leave_one_out(rewards: FloatArray, group_ids: IntArray, valid: BoolArray) -> FloatArray:
    """(B,) each reward minus the mean of the others of its group (arXiv:2402.14740).

    ``R_i - (sum_j R_j - R_i) / (N - 1)``; invalid rows, groups of one and groups of equal rewards get exactly 0.
    """
    rewards = np.asarray(rewards, np.float64)
    advantages_B = np.zeros_like(rewards)
    for members in _groups(rewards, group_ids, valid, uneven=True):
        values = rewards[members]
        advantages_B[members] = (values - values.mean()) * (len(values) / (len(values) - 1))
    return advantages_B


def best_of_group(rewards: FloatArray, group_ids: IntArray, valid: BoolArray, *, threshold: float = 0.0) -> BoolArray:
    """(B,) True for the valid rows with their group's highest reward, if that is above ``threshold``."""
    rewards = np.asarray(rewards, np.float64)
    best_B = np.zeros(len(rewards), bool)
    for members in _groups(rewards, group_ids, valid):
        best = rewards[members].max()
        best_B[members] = (rewards[members] >= best - TOLERANCE) & (rewards[members] > threshold)
    return best_B


def best_and_worst(rewards: FloatArray, group_ids: IntArray, rows: BoolArray) -> tuple[IntArray, IntArray]:
    """(M,) indices of the best, and (M,) of the worst of the ``rows`` of each of M groups; the first of ties.

    Groups without an order are left out: of one row, or of rewards that are equal as float32, which the loss takes.
    """
    pairs = []
    for members in members_of(group_ids, rows):
        values = np.asarray(rewards[members], np.float32)
        if values.max() > values.min():
            pairs.append((members[values.argmax()], members[values.argmin()]))
    best_and_worst_M2 = np.array(pairs, np.int64).reshape(-1, 2)
    return best_and_worst_M2[:, 0], best_and_worst_M2[:, 1]


def mixed_groups(values: FloatArray, group_ids: IntArray, valid: BoolArray) -> BoolArray:
    """(B,) True for the valid rows of groups with two valid values or more that are not all equal."""
    mixed_B = np.zeros(len(values), bool)
    for members in _groups(np.asarray(values, np.float64), group_ids, valid, uneven=True):
        mixed_B[members] = True
    return mixed_B


def members_of(group_ids: IntArray, rows: BoolArray) -> list[IntArray]:
    """Indices, ascending, of those of the ``rows`` that are in each group; groups without any are left out."""
    found = np.flatnonzero(rows)
    ordered = found[np.argsort(group_ids[found], kind="stable")]
    _, starts = np.unique(group_ids[ordered], return_index=True)
    return np.split(ordered, starts[1:]) if len(ordered) else []


def grouped(group_ids: IntArray, valid: BoolArray) -> BoolArray:
    """(B,) True for the valid rows of groups with two valid rows or more."""
    ids, sizes = np.unique(group_ids[valid], return_counts=True)
    return valid & np.isin(group_ids, ids[sizes > 1])


def valid_masks(batch: Batch, rows: BoolArray | None = None) -> list[BoolArray]:
    """The batch's masks, False throughout for rows that are invalid, or not among ``rows``."""
    keep_B = batch.valid if rows is None else batch.valid & rows
    return [mask & keep for mask, keep in zip(batch.masks, keep_B, strict=True)]


def zero_signal_fraction(rewards: FloatArray, group_ids: IntArray, valid: BoolArray) -> float:
    """Share of the groups with a valid reward whose valid rewards are all equal (groups of one included)."""
    groups = len(np.unique(group_ids[valid]))
    mixed = len(np.unique(group_ids[mixed_groups(rewards, group_ids, valid)]))
    return 1.0 - mixed / groups if groups else 1.0


def token_kl(
    logprobs: Sequence[FloatArray], reference_logprobs: Sequence[FloatArray], masks: Sequence[BoolArray]
) -> list[FloatArray]:
    """B arrays (T_i,) of ``log pi - log pi_ref`` (the estimator k1); 0 outside the masks."""
    return [
        np.where(mask, np.asarray(new, np.float64) - np.asarray(reference, np.float64), 0.0)
        for new, reference, mask in zip(logprobs, reference_logprobs, masks, strict=True)
    ]


def mismatched_kl(batch: Batch, rows: BoolArray) -> float:
    """The mean over ``rows`` of ``log pi - log pi_ref`` of their prompts with another row's whole completion; 0 if none
    of them has such a one."""
    policy, reference = batch.mismatched_logprobs, batch.mismatched_reference_logprobs
    assert policy is not None, "the algorithm's needs do not ask for mismatched log-probs"
    assert reference is not None, "the algorithm's needs do not ask for mismatched log-probs of the reference"
    sums = [
        float(np.sum(np.asarray(policy[i], np.float64) - np.asarray(reference[i], np.float64)))
        for i in np.flatnonzero(rows)
        if len(policy[i])
    ]
    return float(np.mean(sums)) if sums else 0.0


def less_sequence_kl(rewards: FloatArray, kl: Sequence[FloatArray] | None) -> FloatArray:
    """(B,) each reward minus the sum of its tokens' KL; the rewards themselves without any."""
    return rewards if kl is None else rewards - np.array([kl_T.sum() for kl_T in kl])


def token_rewards(
    rewards: FloatArray, masks: Sequence[BoolArray], kl: Sequence[FloatArray] | None = None
) -> list[FloatArray]:
    """B arrays (T_i,): the row's reward at its last token in the mask, minus each token's KL; 0 outside the masks."""
    rewards_BT: list[FloatArray] = [np.zeros(len(mask)) for mask in masks]
    for row_T, mask, reward in zip(rewards_BT, masks, rewards, strict=True):
        row_T[np.flatnonzero(mask)[-1:]] = reward
    return rewards_BT if kl is None else [row_T - kl_T for row_T, kl_T in zip(rewards_BT, kl, strict=True)]


def reward_to_go(rewards: Sequence[FloatArray], masks: Sequence[BoolArray], *, gamma: float = 1.0) -> list[FloatArray]:
    """B arrays (T_i,) of ``G_t = r_t + gamma G_{t+1}`` over the tokens in the mask; 0 outside."""
    returns: list[FloatArray] = [np.zeros(len(mask)) for mask in masks]
    for returns_T, rewards_T, mask in zip(returns, rewards, masks, strict=True):
        total = 0.0
        for t in np.flatnonzero(mask)[::-1]:
            returns_T[t] = total = rewards_T[t] + gamma * total
    return returns


def gae(
    rewards: Sequence[FloatArray],
    values: Sequence[FloatArray],
    masks: Sequence[BoolArray],
    *,
    gamma: float = 1.0,
    lam: float | FloatArray = 1.0,
    final_values: FloatArray | None = None,
) -> list[FloatArray]:
    """B arrays (T_i,) of generalised advantages (arXiv:1506.02438) over the tokens in the mask; 0 outside.

    With ``k`` the tokens of a row that are in the mask, one after the other, whatever is between them:
    ``d_k = r_k + gamma V_{k+1} - V_k`` and ``A_k = d_k + gamma lam A_{k+1}``. Advantages plus values are the returns
    that a critic learns; with ``gamma = lam = 1`` they are the rewards that follow.

    Args:
        values: B arrays (T_i,), V at the place that predicts each token.
        lam: One number, or one for each row (B,).
        final_values: (B,) V after each row's last token; None is 0, as after an end.
    """
    lam_B = np.broadcast_to(np.asarray(lam, np.float64), (len(masks),))
    final_B = np.zeros(len(masks)) if final_values is None else np.asarray(final_values, np.float64)
    advantages: list[FloatArray] = [np.zeros(len(mask)) for mask in masks]
    rows = zip(advantages, rewards, values, masks, lam_B, final_B, strict=True)
    for advantages_T, rewards_T, values_T, mask, row_lam, after in rows:
        advantage = 0.0
        for t in np.flatnonzero(mask)[::-1]:
            value = float(values_T[t])
            advantages_T[t] = advantage = rewards_T[t] + gamma * after - value + gamma * row_lam * advantage
            after = value
    return advantages


def explained_variance(values_T: FloatArray, returns_T: FloatArray) -> float:
    """``1 - Var(G - V) / Var(G)``: 1 of values that tell the returns, 0 of constant ones, and of returns that are all
    equal. Values that are off by a constant explain as much as those that are not.
    """
    returns_T = np.asarray(returns_T, np.float64)
    variance = float(returns_T.var()) if len(returns_T) else 0.0
    if variance <= TOLERANCE**2:
        return 0.0
    return 1.0 - float((returns_T - np.asarray(values_T, np.float64)).var()) / variance


def whiten(
    values: Sequence[FloatArray], masks: Sequence[BoolArray], *, ddof: int = 1, eps: float = 1e-8
) -> list[FloatArray]:
    """B arrays (T_i,) ``(x - mean) / sqrt(var + eps)`` over all tokens in the masks; 0 outside, and for one alone."""
    population = np.concatenate([np.zeros(0), *(v[m] for v, m in zip(values, masks, strict=True))])
    if len(population) <= 1:
        return [np.zeros(len(mask)) for mask in masks]
    mean, scale = population.mean(), np.sqrt(population.var(ddof=ddof) + eps)

    def whitened(values_T: FloatArray) -> FloatArray:
        # Differences from the mean by rounding alone become 0: their sign would enter clips and their metrics.
        centred_T = values_T - mean
        return np.where(np.abs(centred_T) <= TOLERANCE, 0.0, centred_T / scale)

    return [np.where(m, whitened(v), 0.0) for v, m in zip(values, masks, strict=True)]


def _groups(rewards: FloatArray, group_ids: IntArray, valid: BoolArray, *, uneven: bool = False) -> Iterator[IntArray]:
    """Indices of the valid rows of each group; ``uneven``: only groups whose rewards are not all equal."""
    for members in members_of(group_ids, valid):
        if not uneven or np.ptp(rewards[members]) > TOLERANCE:
            yield members


def _shaped(batch: Batch, components: Mapping[str, FloatArray], clip: tuple[float, float] | None) -> FloatArray:
    """Steps 2 to 4 of ``shaped_rewards``."""
    total, penalty = np.zeros(len(batch.rewards)), np.zeros(len(batch.rewards))
    for name, values in components.items():
        target = penalty if name in batch.penalties else total
        target += batch.weights[name] * np.where(np.isnan(values), 0.0, values)
    return (total if clip is None else total.clip(*clip)) + penalty


def _std(values: FloatArray, ddof: int) -> float:
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0
