"""Rewards on a scale that a critic learns badly."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mmrl.runs.setup import RunSetup

MOST = 10.0
"""Size of a return up to which a critic's usual rate and clip do."""


def weight_warnings(setup: RunSetup) -> list[str]:
    """A warning if the weights of rewards alone make returns large, in a run that trains a critic."""
    most = _weights(setup)
    return [_warning(f"their weights add up to {most:g}", most)] if _learns_values(setup) and most > MOST else []


def scale_warnings(setup: RunSetup, rewards: Iterable[float], row: str) -> list[str]:
    """A warning if made-up answers to a row earn much, in a run that trains a critic, and weights are not the reason.

    Args:
        rewards: The weighted sums that the answers earn.
        row: Its id.
    """
    most = max((abs(float(reward)) for reward in rewards if np.isfinite(reward)), default=0.0)
    if not _learns_values(setup) or most <= MOST or _weights(setup) > MOST:
        return []
    return [_warning(f"a made-up answer to {row} earns {most:g}", most)]


def _learns_values(setup: RunSetup) -> bool:
    return setup.algorithm.needs().values


def _weights(setup: RunSetup) -> float:
    return sum(abs(reward.weight) for reward in setup.config.rewards)


def _warning(what: str, most: float) -> str:
    why = "a critic begins near 0, its loss grows with the square of returns, and clips of values are absolute"
    return f"rewards: {what}, and {why}; divide the weights by about {most:.0f}, so that returns are about 1"
