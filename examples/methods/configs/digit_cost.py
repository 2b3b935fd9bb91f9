"""A cost for the run of Safe RLHF on digits: the digit that the policy answers, from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.types import Rollout


def digit_cost(rollouts: Sequence[Rollout]) -> list[float]:
    """The last digit of each completion over 9; 0 of one without a digit."""
    digits = [re.findall(r"\d", rollout.text) for rollout in rollouts]
    return [int(found[-1]) / 9 if found else 0.0 for found in digits]
