"""What an evaluation's scores say, without a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmrl.commands.eval.estimates import _at_k
from mmrl.types import ScoredGroup


def test_a_completion_passes_whose_score_is_whole_and_those_without_one_do_not_count() -> None:
    rollouts: Any = None
    scores = {"part": np.array([0.5, 0.9, 1.0, np.nan]), "slow": np.array([1.0, 0.0, 0.0, 0.0])}
    group = ScoredGroup(rollouts, np.zeros(4), np.ones(4, np.bool_), scores)
    found = dict(_at_k([group], frozenset({"slow"}), 2))
    assert {name: estimate.value for name, estimate in found.items()} == {"eval/part_pass@2": 2 / 3}
