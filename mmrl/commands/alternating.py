"""A step's completions with rewards that alternate, for commands that learn from something without asking rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmrl.types import RolloutGroup, ScoredGroup


def alternating(group: RolloutGroup, rewards: Sequence[str], *, greedy: bool) -> ScoredGroup:
    """Score every second member 1, so that there is something to learn.

    Args:
        rewards: Names of the components.
        greedy: True to make the first member the greedy one too, for an algorithm that compares with it.
    """
    values = np.arange(len(group.rollouts)) % 2.0
    components = dict.fromkeys(rewards, values)
    found = ScoredGroup(group, values, np.ones(len(values), bool), components)
    if not greedy:
        return found
    one = ScoredGroup(
        RolloutGroup(group.prompt, group.rollouts[:1]),
        values[:1],
        np.ones(1, bool),
        dict.fromkeys(components, values[:1]),
    )
    return replace(found, greedy=one)
