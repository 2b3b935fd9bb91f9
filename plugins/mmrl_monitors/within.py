"""Numbers of a step's groups that more than one monitor needs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mmrl.types import FloatArray, Rollout, ScoredGroup

HALF = 0.5
"""A value from here on is no plain failure, though not right: rewards may be graded."""
LEAST = 3
"""Rollouts of a group without which a correlation says nothing."""


def lengths(rollouts: Iterable[Rollout]) -> FloatArray:
    """Tokens that the policy wrote in each rollout."""
    return np.array([np.count_nonzero(rollout.mask) for rollout in rollouts], np.float64)


def correlation(one: FloatArray, other: FloatArray) -> float | None:
    """Pearson's correlation; None if there are too few values, or all of one side are equal."""
    if len(one) < LEAST or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def rank_correlation(one: FloatArray, other: FloatArray) -> float | None:
    """Spearman's correlation, equal values having their mean rank; None as ``correlation``."""
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: FloatArray) -> FloatArray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def best_value(groups: Iterable[ScoredGroup], component: str | None) -> dict[str, float]:
    """Under ``best`` the largest value that a scored completion has of a component; nothing if there is none."""
    if component is None:
        return {}
    found = [group.component(component)[group.valid] for group in groups]
    values = np.concatenate([*found, np.zeros(0)])
    values = values[~np.isnan(values)]
    return {"best": float(values.max())} if len(values) else {}


def mean(values: Iterable[float | None]) -> dict[str, float]:
    """Under ``mean`` the mean of the values that are there; nothing if none is."""
    known = [value for value in values if value is not None]
    return {"mean": float(np.mean(known))} if known else {}


def on_set(prefix: str) -> str:
    """The words for an evaluation set whose metrics have a prefix (``RunFacts.judges``); none if it has no name."""
    return f" on {prefix.rstrip('/')}" if prefix else ""
