"""GHPO's hints: which groups get one, and what the policy then reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.testing import check_algorithm, make_rollouts, replay
from mmrl.types import Message, Prompt, RolloutGroup, ScoredGroup
from mmrl_methods.ghpo import GHPO

SOLUTION = "12345678 <image> 90"


def group(rewards: list[float], *, retries: int = 0, columns: Any = None, prompt: Prompt | None = None) -> ScoredGroup:
    """A group with these rewards, NaN where invalid."""
    columns = {"solution": SOLUTION} if columns is None else columns
    rollouts = make_rollouts([str(place) for place in range(len(rewards))], columns=columns)
    row = replace(prompt or rollouts[0].prompt.prompt, retries=retries)
    encoded = replace(rollouts[0].prompt, prompt=row)
    values = np.array(rewards)
    valid = ~np.isnan(values)
    made = RolloutGroup(encoded, tuple(replace(each, prompt=encoded) for each in rollouts))
    return ScoredGroup(made, np.where(valid, values, 0.0), valid, {"math": values})


def algorithm(**options: Any) -> GHPO:
    return GHPO(GHPO.Config(**options))


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0, 0, 0], False), ([0, 1, 0], True), ([1, 1, 1], True), ([-1, 0], False), ([np.nan, 0], False)],
)
def test_a_group_that_is_all_wrong_is_sampled_once_more(rewards: list[float], kept: bool) -> None:
    assert algorithm().select([group(rewards)]) == [kept]
    assert (algorithm().retry(group(rewards)) is None) == kept


def test_a_group_that_nothing_could_score_is_kept() -> None:
    assert algorithm().select([group([np.nan, np.nan])]) == [True]


def test_the_hint_grows_from_retry_to_retry() -> None:
    """19 characters: round(4.75) is 5, round(9.5) is 10 and round(14.25) is 14. A hint brings no image along."""
    prompt, hints = None, []
    for retries in range(3):
        prompt = algorithm(lead="\nHINT ").retry(group([0, 0], retries=retries, prompt=prompt))
        assert prompt is not None
        (message,) = prompt.messages
        hints.append(message.content)
    assert hints == [f"What is 3 + 4?\nHINT {hint}" for hint in ("12345", "12345678 <", "12345678 <imag")]
    whole = algorithm(lead=" ", ratios=[1.0]).retry(group([0]))
    assert whole is not None and whole.messages[0].content.endswith("12345678  90")
    assert algorithm().select([group([0, 0], retries=3, prompt=prompt)]) == [True]
    assert algorithm().retry(group([0, 0], retries=3)) is None


@pytest.mark.parametrize(("solution", "hints"), [("7", ["7"]), ("12", ["1", "12"]), (" 7", ["7"])])
def test_blank_and_repeated_hints_of_a_short_solution_are_left_out(solution: str, hints: list[str]) -> None:
    row = group([0], columns={"solution": solution}).group.prompt.prompt
    assert [hint.strip() for hint in algorithm(ratios=[0.25, 0.5, 0.75, 1.0]).hints(row)] == hints


def test_ratios_rise() -> None:
    with pytest.raises(ValueError, match="each is above the one before"):
        algorithm(ratios=[0.75, 0.25])


def test_rows_without_hints_are_counted_and_a_column_that_no_row_has_is_refused() -> None:
    rows = [group([0], columns=columns).group.prompt.prompt for columns in ({}, {"solution": SOLUTION})]
    assert algorithm().check_rows(rows[1:]) == ()
    (told,) = algorithm().check_rows(rows)
    assert told.startswith("1 of 2 rows have no hint") and "'solution'" in told
    with pytest.raises(ValueError, match="none of 2 rows has a hint; solution names the column 'other'"):
        algorithm(solution="other").check_rows(rows)


def test_the_hint_is_in_the_last_message_of_the_same_row() -> None:
    messages = (Message("system", "Be brief."), Message("user", "Why?"))
    row = replace(group([0]).group.prompt.prompt, messages=messages)
    found = algorithm().retry(group([0], prompt=row))
    assert found is not None and found.id == row.id and found.columns == row.columns
    assert found.messages[0] == messages[0] and found.messages[1].content.startswith("Why?\nThe following text is")


@pytest.mark.parametrize("columns", [{}, {"solution": " "}, {"solution": None}, {"solution": 7}])
def test_a_row_without_a_solution_is_kept(columns: dict[str, Any]) -> None:
    assert algorithm().select([group([0, 0], columns=columns)]) == [True]


def test_the_metric_may_be_chosen() -> None:
    scored = replace(group([0, 0]), components={"format": np.ones(2), "math": np.zeros(2)})
    assert algorithm().select([scored]) == [True]
    assert algorithm(metric="math").select([scored]) == [False]
    assert algorithm(metric="format", wrong=1.0).select([scored]) == [False]
    facts = RunFacts(8, 1, 8, 1, rewards=("math",), accuracy="math")
    assert algorithm().check(facts) == ()
    with pytest.raises(ValueError, match="metric is 'iou', and the rewards are math"):
        algorithm(metric="iou").check(facts)
    with pytest.raises(ValueError, match="dynamic_sampling"):
        algorithm(dynamic_sampling={}).check(facts)


def test_it_asks_for_as_many_rounds_as_there_are_hints() -> None:
    refill = algorithm(ratios=[0.5, 1.0]).needs().refill
    assert refill is not None and refill.max_rounds == 2


def test_loss_and_gradient_are_grpos() -> None:
    """Rewards 1 and 0: advantages 1 and -1 over sqrt(2); the first has two tokens, of a ratio of 1."""
    batch = {
        "group_ids": [0, 0],
        "rewards": [1.0, 0.0],
        "response_mask": [[1, 1], [1, 0]],
        **{name: [[-1.0, -1.0], [-2.0, 0.0]] for name in ("old_log_probs", "log_probs", "rollout_log_probs")},
    }
    found = replay("ghpo", batch)
    a = 1 / np.sqrt(2)
    np.testing.assert_allclose(found.advantages, [a, -a], rtol=1e-5)
    np.testing.assert_allclose(found.grad_log_probs, [[-a / 4, -a / 4], [a / 2, 0]], rtol=1e-5)


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("ghpo")
