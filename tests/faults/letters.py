"""Rewards of the fake engine's runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import SystemRandom
from typing import Any


def letters(rollouts: Sequence[Any]) -> list[float]:
    """More for early letters of the alphabet, and for each prompt another amount."""
    return [sum(ord("p") - ord(letter) for letter in each.text) / 10 + len(each.prompt.id) % 3 for each in rollouts]


def early(rollouts: Sequence[Any]) -> list[float]:
    """Scores 1 for a completion that begins in the alphabet's first half: often the same for a whole small group."""
    return [float(each.text[:1] < "h") for each in rollouts]


def even(rollouts: Sequence[Any]) -> list[float]:
    """The share of even tokens: whatever a model of random weights writes, it differs from rollout to rollout."""
    return [float((each.token_ids % 2 == 0).mean()) for each in rollouts]


def drowsy_letters(rollouts: Sequence[Any]) -> list[float]:
    """As ``letters``, after a while that is another one in each call."""
    doze()
    return letters(rollouts)


def drowsy_early(rollouts: Sequence[Any]) -> list[float]:
    """As ``early``, after a while that is another one in each call."""
    doze()
    return early(rollouts)


def doze() -> None:
    time.sleep(SystemRandom().uniform(0.0, 0.02))
