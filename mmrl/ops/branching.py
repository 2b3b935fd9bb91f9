"""Trees of episodes that go on from others of their group: where they may branch, and who shares which tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from mmrl.types import BoolArray, Branch, BranchedRows, FloatArray, IntArray, Rollout


def generator(group: Sequence[Rollout]) -> np.random.Generator:
    """A generator for ``Algorithm.branch``: its seed follows from the episodes that the group has so far alone.

    Another seed of the run samples other tokens, and so gives another generator; a run that goes on has the same ones.
    """
    digest = hashlib.sha256()
    for rollout in group:
        digest.update(repr(rollout.key).encode("utf-8", "surrogatepass") + rollout.token_ids.tobytes())
    return np.random.default_rng(int.from_bytes(digest.digest()[:16], "big"))


def places(group: Sequence[Rollout]) -> list[Branch]:
    """All places from which an episode can go on: each turn of each member, in their order.

    A member whose environment failed at its reset has none; a new episode can begin anew at turn 0 of it all the same.
    """
    return [Branch(member, turn) for member, rollout in enumerate(group) for turn in range(len(rollout.episode))]


def roots(branches: BranchedRows) -> IntArray:
    """(B,) int64, the row with which each row's tree begins: itself where it shares no token with a parent."""
    found = np.arange(len(branches.parents))
    for row, parent, shared in _rows(branches):
        if parent >= 0 and shared:
            found[row] = found[parent]
    return found


def sums_over_sharers(branches: BranchedRows, values: FloatArray, lengths: Sequence[int]) -> list[FloatArray]:
    """For each row, at each of its tokens, the sum of a value over all rows that share the token, itself among them.

    Args:
        values: (B,) a value of each row.
        lengths: T_i, tokens of each row.

    Returns:
        B arrays (T_i,) float64.
    """
    found: list[FloatArray] = [
        np.full(length, value, np.float64) for length, value in zip(lengths, values, strict=True)
    ]
    for row, parent, shared in _rows(branches):
        while parent >= 0:  # all that it shares with each of those from which it descends
            found[parent][:shared] += values[row]
            parent, shared = branches.parents[parent], min(shared, branches.shared_tokens[parent])
    for row, parent, shared in _rows(branches):  # a parent's are complete before its children take them over
        if parent >= 0:
            found[row][:shared] = found[parent][:shared]
    return found


def sharers(branches: BranchedRows, lengths: Sequence[int], where: BoolArray | None = None) -> list[FloatArray]:
    """For each row, at each of its tokens, the number of rows that share the token: the leaves below it in the tree.

    Args:
        lengths: T_i, tokens of each row.
        where: (B,) the rows that count; None counts all.
    """
    counted = np.ones(len(lengths)) if where is None else where.astype(np.float64)
    return sums_over_sharers(branches, counted, lengths)


def means_over_sharers(
    branches: BranchedRows, values: FloatArray, lengths: Sequence[int], where: BoolArray
) -> list[FloatArray]:
    """For each row, at each of its tokens, the mean of a value over all rows that share the token.

    Args:
        values: (B,) a value of each row; finite where it counts.
        lengths: T_i, tokens of each row.
        where: (B,) the rows that count, such as ``Batch.valid``; where none does, the mean is 0.

    Returns:
        B arrays (T_i,) float64.
    """
    sums = sums_over_sharers(branches, np.where(where, values, 0.0), lengths)
    counts = sharers(branches, lengths, where)
    return [total / np.maximum(count, 1.0) for total, count in zip(sums, counts, strict=True)]


def _rows(branches: BranchedRows) -> Iterator[tuple[int, int, int]]:
    """Each row with its parent and the tokens that it shares with that; parents come before their children."""
    pairs = zip(branches.parents.tolist(), branches.shared_tokens.tolist(), strict=True)
    return ((row, parent, shared) for row, (parent, shared) in enumerate(pairs))
