"""Scaf-GRPO's ladder of hints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.testing import check_algorithm, make_rollouts
from mmrl.types import RolloutGroup, ScoredGroup
from mmrl_methods.scaf_grpo import ScafGRPO

COLUMNS: dict[str, Any] = {"knowledge": "a b c d", "planning": "e f g h i", "solution": "j"}


def hints(row: dict[str, Any], **options: Any) -> list[str]:
    (rollout,) = make_rollouts(["x"], columns=row)
    return list(ScafGRPO(ScafGRPO.Config(**options)).hints(rollout.prompt.prompt))


def test_hints_grow_by_words_from_the_vaguest_to_the_plainest() -> None:
    """Five words in four parts: 2, 3, 4 and 5."""
    first, second = ["a", "a b", "a b c", "a b c d"], ["e f", "e f g", "e f g h", "e f g h i"]
    assert hints(COLUMNS) == [*first, *second, "j"]
    assert hints(COLUMNS, columns=["planning"], parts=2) == ["e f g", "e f g h i"]
    assert hints({"solution": "j k"}, parts=1) == ["j k"]
    assert hints({}) == []


def test_a_group_that_is_all_wrong_gets_the_first_hint() -> None:
    rollouts = make_rollouts(["x", "y"], columns=COLUMNS)
    zeros = np.zeros(2)
    group = ScoredGroup(RolloutGroup(rollouts[0].prompt, tuple(rollouts)), zeros, np.ones(2, bool), {"math": zeros})
    algorithm = ScafGRPO(ScafGRPO.Config())
    assert algorithm.select([group]) == [False]
    prompt = algorithm.retry(group)
    assert prompt is not None and prompt.messages[0].content == "What is 3 + 4?\nHint: a"
    refill = algorithm.needs().refill
    assert refill is not None and refill.max_rounds == 12


@pytest.mark.parametrize("options", [{}, {"parts": 1, "columns": ["solution"]}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, Any]) -> None:
    check_algorithm("scaf_grpo", options=options)
