"""The penalty for repetition, by hand, and the rules of rewards."""

from __future__ import annotations

import pytest

from mmrl.testing import check_reward, make_rollouts
from mmrl_lite_ppo.repetition import Repetition


@pytest.mark.parametrize(
    ("text", "n", "penalty"),
    [
        ("", 3, 0.0),
        ("no no", 3, 0.0),
        ("one two three four", 3, 0.0),
        ("so it is so it is", 3, -1 / 4),  # so-it-is, it-is-so, is-so-it, so-it-is
        ("No no NO no", 1, -3 / 4),
        ("a b\na  b", 2, -1 / 3),
        ("and " * 101, 2, -99 / 100),
    ],
)
def test_the_penalty_is_the_share_of_runs_that_were_there_before(text: str, n: int, penalty: float) -> None:
    reward = Repetition(Repetition.Config(n=n))
    assert reward.score(make_rollouts([text])) == [pytest.approx(penalty)]


def test_it_keeps_the_rules_of_rewards() -> None:
    check_reward("repetition")
    check_reward(Repetition, options={"n": 1}, rollouts=make_rollouts(["no no", "yes", "no no"]))
    assert Repetition.penalty
