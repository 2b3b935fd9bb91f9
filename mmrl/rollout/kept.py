"""Rollouts that a run keeps for later steps, and their form in records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmrl.types import Experience, RolloutGroup, ScoredGroup

Kept = Mapping[str, tuple[Experience, ...]]
"""The rollouts that a run keeps, by their prompt's id, the oldest first. It is replaced and never changed."""


def experience_of(group: ScoredGroup, member: int) -> Experience:
    """A member as it is kept, without the sampler's experts."""
    return Experience(
        replace(group.rollouts[member], experts=None),
        float(group.rewards[member]),
        {name: float(values_G[member]) for name, values_G in group.components.items()},
        {name: found[member] for name, found in group.answers.items()},
        group.token_rewards[member] if group.token_rewards else None,
    )


def alone(kept: Experience) -> ScoredGroup:
    """A kept rollout as a group of one, as records have it."""
    return ScoredGroup(
        RolloutGroup(kept.rollout.prompt, (kept.rollout,)),
        np.array([kept.reward]),
        np.ones(1, np.bool_),
        {name: np.array([value]) for name, value in kept.components.items()},
        answers={name: [answer] for name, answer in kept.answers.items()},
        token_rewards=() if kept.token_rewards is None else (kept.token_rewards,),
    )


def kept_of(groups: Sequence[ScoredGroup]) -> Kept:
    """The rollouts that ``alone`` has made these groups of, in their order."""
    found: dict[str, tuple[Experience, ...]] = {}
    for group in groups:
        found[group.group.prompt.id] = (*found.get(group.group.prompt.id, ()), experience_of(group, 0))
    return found
