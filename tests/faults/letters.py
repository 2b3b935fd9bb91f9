"""The sweeps' reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def letters(rollouts: Sequence[Any]) -> list[float]:
    """More for early letters of the alphabet, and for each prompt another amount."""
    return [sum(ord("p") - ord(letter) for letter in each.text) / 10 + len(each.prompt.id) % 3 for each in rollouts]
