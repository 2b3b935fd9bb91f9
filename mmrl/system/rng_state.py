"""The states of Python's and numpy's global random generators, as JSON can hold them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def seed_generators(seed: int) -> None:
    """Begin as every other run with this seed; ``seed`` is below 2**32."""
    random.seed(seed)
    np.random.seed(seed)


def generators() -> dict[str, Any]:
    """What ``set_generators`` needs."""
    version, words, gauss = random.getstate()
    twister: Any = np.random.get_state()  # of a Mersenne Twister, unless someone has replaced it
    name, numpy_words, *numbers = twister
    return {"python": [version, list(words), gauss], "numpy": [name, numpy_words.tolist(), *numbers]}


def set_generators(state: Mapping[str, Any]) -> None:
    """Go on where ``generators`` was asked.

    Raises:
        ValueError, TypeError, KeyError: It is no such state.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, numpy_words, *numbers = state["numpy"]
    np.random.set_state((name, np.array(numpy_words, np.uint32), *numbers))
