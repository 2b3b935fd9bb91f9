"""Random numbers go on where they were saved."""

from __future__ import annotations

import json
import random

import numpy as np

from mmrl.system.rng_state import generators, seed_generators, set_generators


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.random()]


def test_generators_go_on_where_they_were_asked_for() -> None:
    before = generators()
    try:
        seed_generators(5)
        draw()  # normal numbers come in pairs: one of each generator is left
        state = json.loads(json.dumps(generators()))
        expected = draw()
        seed_generators(6)
        assert draw() != expected
        set_generators(state)
        assert draw() == expected
    finally:
        set_generators(before)
