"""The numbers of an evaluation that only episodes have: turns, calls, observations, and what ended them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np

from mmrl.ops.estimation import Estimate, mean_estimate, score_estimate
from mmrl.types import FinishReason, Rollout, ScoredGroup

SECTION = "eval/episode/"
REASONS: tuple[str, ...] = get_args(FinishReason)
"""Reasons that may have ended an episode."""


def episode_estimates(groups: Sequence[ScoredGroup]) -> dict[str, Estimate]:
    """Means over episodes, with intervals that count prompts; empty without an environment.

    - ``eval/episode/turns_mean``, ``calls_mean``, ``observation_tokens_mean``: of an episode's turns, tool calls, and
      tokens that the policy has not written.
    - ``eval/episode/finish_<reason>_fraction``: episodes that ended so.
    - ``eval/episode/invalid_calls_fraction``: calls that could not be read, of all calls; left out if there are none.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(rollout.episode or rollout.failure for rollout in rollouts):
        return {}
    prompts = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    counts = {
        "turns_mean": [len(rollout.episode) for rollout in rollouts],
        "calls_mean": [len(list(_errors(rollout))) for rollout in rollouts],
        "observation_tokens_mean": [int((~rollout.mask).sum()) for rollout in rollouts],
    }
    found = {name: mean_estimate(np.array(values, np.float64), prompts) for name, values in counts.items()}
    for reason in REASONS:
        ended = np.array([rollout.finish_reason == reason for rollout in rollouts], np.float64)
        found[f"finish_{reason}_fraction"] = score_estimate(ended, prompts)
    errors = [error for rollout in rollouts for error in _errors(rollout)]
    if errors:
        found["invalid_calls_fraction"] = Estimate(sum(map(bool, errors)) / len(errors))
    return {SECTION + name: estimate for name, estimate in found.items()}


def _errors(rollout: Rollout) -> Iterator[str]:
    """The error of each call, empty for one that could be read."""
    return (call.error for played in rollout.episode for call in played.turn.calls)
