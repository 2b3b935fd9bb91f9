"""A ragged batch, and slopes of a loss by central differences, for the tests of all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mmrl.testing import replay

Array = np.ndarray[Any, Any]
STEP = 1e-5


@pytest.fixture
def ragged() -> dict[str, Any]:
    """Seven rows of two groups, interleaved, and of a group of one; two rows have a hole, one cannot be scored."""
    rng = np.random.default_rng(7)
    lengths = np.array([3, 5, 2, 4, 1, 5, 4])
    mask = np.arange(5) < lengths[:, None]
    mask[1, 2] = mask[5, 0] = False
    old = -rng.exponential(1.0, mask.shape)
    return {
        "group_ids": np.array([4, 9, 4, 9, 4, 9, 7]),
        "rewards": np.array([1.0, 0.2, -0.5, 0.9, 0.3, 0.0, 0.6]),
        "reward_valid": np.array([1, 1, 1, 1, 1, 0, 1], bool),
        "truncated": np.array([0, 1, 0, 0, 0, 1, 0], bool),
        "response_mask": mask,
        "old_log_probs": old,
        "log_probs": np.minimum(old + rng.normal(0, 0.3, mask.shape), 0.0),
        "ref_log_probs": np.minimum(old + rng.normal(0, 0.3, mask.shape), 0.0),
        "rollout_log_probs": old,
        "entropy": rng.exponential(1.0, mask.shape),
    }


Slopes = Callable[..., Array]


@pytest.fixture
def slopes() -> Slopes:
    """Derivatives of an algorithm's loss in each log-prob, (B, T), by central differences."""

    def found(algorithm: str, batch: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Array:
        gradient = np.zeros(np.shape(batch["log_probs"]))
        for place in np.argwhere(np.asarray(batch["response_mask"], bool)):
            values = []
            for sign in (1, -1):
                moved = np.array(batch["log_probs"], np.float64)
                moved[tuple(place)] += sign * STEP
                values.append(replay(algorithm, {**batch, "log_probs": moved}, options=options).loss)
            gradient[tuple(place)] = (values[0] - values[1]) / (2 * STEP)
        return gradient

    return found
