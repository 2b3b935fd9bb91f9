"""The states of Python's and numpy's global random generators, as JSON can hold them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def seed_generators(seed: int) -> None:
    """Set the generators from a seed below 2**32."""
    random.seed(seed)
    np.random.seed(seed)


def generators() -> dict[str, Any]:
    """The generators' states, for ``set_generators``."""
    version, words, gauss = random.getstate()
    twister: Any = np.random.get_state()  # of a Mersenne Twister, unless someone has replaced it
    name, numpy_words, *numbers = twister
    return {"python": [version, list(words), gauss], "numpy": [name, numpy_words.tolist(), *numbers]}


def set_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to the states that ``generators`` returned.

    Raises:
        ValueError, TypeError, KeyError: ``state`` is no such state.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, numpy_words, *numbers = state["numpy"]
    np.random.set_state((name, np.array(numpy_words, np.uint32), *numbers))
