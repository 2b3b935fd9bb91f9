"""gigpo: advantages by hand, a second implementation, and what must not change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError, PluginError
from mmrl.interfaces import Needs, RunFacts
from mmrl.testing import check_algorithm, replay
from mmrl.testing.batches import random_batch, reordered
from mmrl.types import ENVIRONMENT
from mmrl_algorithms.gigpo import GiGPO
from mmrl_algorithms.grpo import GRPO

PLAIN = {"normalise": "none", "gamma": 0.5}


def batch_of(
    *episodes: tuple[int, list[str], list[float], float], valid: Any = None, holes: bool = True
) -> dict[str, Any]:
    """Episodes (prompt, states, rewards of turns, further reward) whose turns have two tokens and then an inserted one,
    which the last turn lacks."""
    longest = 3 * max(len(states) for _, states, _, _ in episodes)
    rows = len(episodes)
    mask, turns = np.zeros((rows, longest), bool), np.zeros((rows, longest), int)
    for row, (_, states, _, _) in enumerate(episodes):
        written = 3 * len(states) - 1
        turns[row] = np.minimum(np.arange(longest) // 3, len(states) - 1)
        mask[row, :written] = np.arange(written) % 3 < (2 if holes else 3)
    zeros = np.zeros((rows, longest))
    return {
        "group_ids": np.array([prompt for prompt, *_ in episodes]),
        "components": {
            ENVIRONMENT: np.array([sum(rewards) for _, _, rewards, _ in episodes]),
            "right": np.array([more for *_, more in episodes]),
        },
        "reward_valid": np.ones(rows, bool) if valid is None else np.array(valid),
        "response_mask": mask,
        "log_probs": zeros,
        "rollout_log_probs": zeros,
        "turns": turns,
        "turn_rewards": [rewards for _, _, rewards, _ in episodes],
        "turn_states": [states for _, states, _, _ in episodes],
    }


def of_turns(batch: dict[str, Any], **options: Any) -> list[list[float]]:
    """Each row's advantages, turn by turn."""
    found = replay(GiGPO, batch, options=options).advantages
    answer = []
    for row, states in enumerate(batch["turn_states"]):
        own = [found[row][batch["response_mask"][row] & (batch["turns"][row] == turn)] for turn in range(len(states))]
        assert all(len(values) == 2 and values[0] == values[1] for values in own)
        answer.append([float(values[0]) for values in own])
    assert not found[~batch["response_mask"]].any()
    return answer


def test_advantages_by_hand() -> None:
    """State ``a`` is met three times, twice by one episode; ``b`` and ``c`` once."""
    batch = batch_of(
        (7, ["start", "a", "a"], [0.0, 0.0, 1.0], 0.0),
        (7, ["start", "a"], [0.0, 0.0], 0.0),
        (3, ["start", "b"], [1.0, 0.0], 0.0),
        (3, ["start", "c"], [0.0, 0.0], 0.0),
    )
    # returns at gamma 1/2: [1/4, 1/2, 1], [0, 0], [1, 0], [0, 0]; start of one prompt is not that of another
    expected = [[0.5 + 0.125, 0.5 + 0.0, 0.5 + 0.5], [-0.5 - 0.125, -0.5 - 0.5], [0.5 + 0.5, 0.5], [-0.5 - 0.5, -0.5]]
    for found, values in zip(of_turns(batch, **PLAIN), expected, strict=True):
        assert found == pytest.approx(values)
    half = of_turns(batch, **PLAIN, step_weight=0.5)
    assert half[0] == pytest.approx([0.5625, 0.5, 0.75])
    std = of_turns(batch, gamma=0.5, std_eps=1e-12)
    root = np.sqrt(0.5)  # the deviation of two values is their difference times it
    assert std[0] == pytest.approx([2 * 0.5 / root, root, root + 0.5 / 0.5])  # [1/2, 1, 0] deviates by 1/2
    assert std[3] == pytest.approx([-root - root, -root])


def test_what_the_environment_did_not_give_is_a_reward_of_the_last_turn() -> None:
    batch = batch_of((0, ["start", "a"], [1.0, 0.0], 2.0), (0, ["start", "a"], [0.0, 0.0], 0.0))
    assert of_turns(batch, **PLAIN)[0] == pytest.approx([1.5 + (1 + 0.5 * 2) / 2, 1.5 + 1.0])
    assert of_turns(batch, **PLAIN, outcome=False)[0] == pytest.approx([1.5 + 0.5, 1.5])
    halved = {**batch, "weights": {ENVIRONMENT: 0.5}}
    assert of_turns(halved, **PLAIN)[0] == pytest.approx([1.25 + (0.5 + 0.5 * 2) / 2, 1.25 + 1.0])
    # At gamma 1, a turn's return is what is left of the total: the first turn's is the total.
    undiscounted = of_turns(batch, normalise="none", gamma=1.0)
    assert undiscounted[0] == pytest.approx([1.5 + 1.5, 1.5 + 1.0])


def test_a_state_that_is_met_once_adds_exactly_nothing() -> None:
    batch = batch_of((0, ["x", "a"], [1.0, 0.0], 0.0), (0, ["y", "b"], [0.0, 0.0], 0.0), (0, ["z"], [0.25], 0.0))
    found, plain = of_turns(batch), replay(GRPO, batch).advantages
    assert found == [[plain[0]] * 2, [plain[1]] * 2, [plain[2]]]
    equal = batch_of((0, ["x", "a"], [0.0, 0.3], 0.0), (0, ["x", "a"], [0.0, 0.3], 0.0))
    assert of_turns(equal) == [[0.0, 0.0]] * 2


def test_without_steps_it_is_grpo() -> None:
    batch = random_batch(Needs(turns=True, min_group_size=2), binary_rewards=False, seed=3)
    one, other = replay(GiGPO, batch, options={"step_weight": 0.0}), replay(GRPO, batch)
    np.testing.assert_array_equal(one.advantages, other.advantages[:, None] * batch["response_mask"])
    np.testing.assert_array_equal(one.grad_log_probs, other.grad_log_probs)
    assert one.loss == other.loss


def test_rows_that_are_not_valid_are_in_no_statistic() -> None:
    episodes = [(0, ["x", "a"], [1.0, 0.0], 0.0), (0, ["x", "a"], [0.0, 0.5], 0.0), (0, ["x", "a"], [9.0, -9.0], 5.0)]
    found = of_turns(batch_of(*episodes, valid=[True, True, False]))
    assert found[:2] == of_turns(batch_of(*episodes[:2])) and found[2] == [0.0, 0.0]


def by_loops(batch: dict[str, Any], gamma: float, weight: float, std: bool) -> list[list[float]]:
    """The paper's equations, value by value: each row's turns."""
    rows = [row for row in range(len(batch["group_ids"])) if batch["reward_valid"][row]]

    def relative(own: float, values: list[float]) -> float:
        mean = sum(values) / len(values)
        if max(values) - min(values) < 1e-8:
            return 0.0
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        return (own - mean) / (deviation + 1e-6) if std else own - mean

    def reward(row: int, turn: int) -> float:
        given = batch["turn_rewards"][row]
        rest = batch["rewards"][row] - sum(given) if turn == len(given) - 1 else 0.0
        return float(given[turn]) + rest

    def remaining(row: int, turn: int) -> float:
        count = len(batch["turn_rewards"][row])
        return sum(gamma ** (later - turn) * reward(row, later) for later in range(turn, count))

    answer = []
    for row in range(len(batch["group_ids"])):
        own, states = batch["group_ids"][row], batch["turn_states"][row]
        if row not in rows:
            answer.append([0.0] * (1 + batch["turns"][row].max()))
            continue
        group = [other for other in rows if batch["group_ids"][other] == own]
        episode = relative(batch["rewards"][row], [batch["rewards"][other] for other in group])
        values = []
        for turn, state in enumerate(states):
            alike = [
                remaining(other, k)
                for other in group
                for k, found in enumerate(batch["turn_states"][other])
                if found == state
            ]
            values.append(episode + weight * relative(remaining(row, turn), alike))
        answer.append(values)
    return answer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "weight", "std"), [(0.95, 1.0, True), (0.5, 0.3, False), (1.0, 2.0, True)])
def test_a_second_implementation_finds_the_same(seed: int, gamma: float, weight: float, std: bool) -> None:
    batch = random_batch(Needs(turns=True, min_group_size=2), binary_rewards=seed == 0, seed=seed)
    options = {"gamma": gamma, "step_weight": weight, "normalise": "std" if std else "none"}
    found = replay(GiGPO, batch, options=options)
    expected = by_loops(batch, gamma, weight, std)
    tokens = [np.array(values)[turns] for values, turns in zip(expected, batch["turns"], strict=True)]
    np.testing.assert_allclose(found.advantages, np.array(tokens) * batch["response_mask"], atol=1e-9)
    assert np.ptp([value for values in expected for value in values]) > 0.5
    order = np.random.default_rng(seed).permutation(len(expected))
    again = replay(GiGPO, reordered(batch, order), options=options, ranks=2, microbatches=2)
    np.testing.assert_allclose(again.advantages, found.advantages[order], atol=1e-12)
    np.testing.assert_allclose(again.grad_log_probs, found.grad_log_probs[order], atol=1e-12)


def test_every_episode_twice_changes_no_difference() -> None:
    batch = random_batch(Needs(turns=True, min_group_size=2), binary_rewards=False, seed=5)
    twice = reordered(batch, np.repeat(np.arange(len(batch["rewards"])), 2))
    one, two = (replay(GiGPO, each, options={"normalise": "none"}).advantages for each in (batch, twice))
    # A row that was alone among the valid ones of its prompt has one beside it now, which is equal.
    np.testing.assert_allclose(two[::2], one, atol=1e-12)
    np.testing.assert_allclose(two[1::2], one, atol=1e-12)


def test_metrics_by_hand() -> None:
    batch = batch_of((0, ["x", "a", "x"], [0.0, 0.0, 1.0], 0.0), (0, ["y"], [0.0], 0.0))
    metrics = replay(GiGPO, batch, options={"normalise": "none", "gamma": 0.5}).metrics
    assert metrics["group/shared_states_fraction"] == 0.5
    assert metrics["advantage/turn_abs_mean"] == pytest.approx((0.375 + 0 + 0.375 + 0) / 4)  # x: returns 1/4 and 1


@pytest.mark.parametrize(
    "options", [{}, {"normalise": "none", "outcome": False, "kl": {"coef": 0.1, "where": "reward"}}]
)
def test_it_keeps_the_rules_of_algorithms(options: dict[str, Any]) -> None:
    check_algorithm(GiGPO, options=options)


def test_an_algorithm_that_reads_turns_of_invalid_rows_breaks_a_rule() -> None:
    class Reads(GiGPO):
        """Adds the rewards of all turns."""

        def advantages(self, batch: Any, rewards: Any, kl: Any) -> Any:
            credit = super().advantages(batch, rewards, kl)
            sums = sum(float(np.sum(values)) for values in batch.turn_rewards)
            return type(credit)([values + sums for values in credit.advantages])

    with pytest.raises(PluginError, match="validity is False"):
        check_algorithm(Reads)


def test_a_run_without_an_environment_is_refused() -> None:
    algorithm = GiGPO(GiGPO.Config())
    facts = {"group_size": 4, "prompts_per_step": 4, "max_new_tokens": 16, "updates_per_batch": 1}
    with pytest.raises(ValueError, match="there is no environment"):
        algorithm.check(RunFacts(**facts, rewards=("right",)))
    assert not algorithm.check(RunFacts(**facts, rewards=("right", ENVIRONMENT)))


def test_recorded_turns_that_do_not_fit_are_told() -> None:
    batch = batch_of((0, ["x", "a"], [0.0, 1.0], 0.0), (0, ["x"], [0.0], 0.0))
    with pytest.raises(DataError, match="lacks turns, turn_rewards, turn_states"):
        replay(GiGPO, {key: value for key, value in batch.items() if "turn" not in key})
    with pytest.raises(DataError, match="turns go with turn_rewards and turn_states"):
        replay(GiGPO, {**batch, "turn_rewards": [[0.0, 1.0]]})
    with pytest.raises(DataError, match="row 1 has 1 rewards, 1 states, and tokens of turns up to 1"):
        replay(GiGPO, {**batch, "turns": np.ones_like(batch["turns"])})


def test_an_episode_that_failed_before_its_first_answer_has_no_turns() -> None:
    episodes = [(0, ["x", "a"], [1.0, 0.0], 0.0), (0, ["x", "a"], [0.0, 0.5], 0.0), (0, ["x", "a"], [0.0, 0.0], 0.0)]
    batch = batch_of(*episodes, valid=[True, True, False])
    expected = replay(GiGPO, batch)
    failed = {**batch, "turn_rewards": [*batch["turn_rewards"][:2], []], "turn_states": [*batch["turn_states"][:2], []]}
    found = replay(GiGPO, failed)
    np.testing.assert_array_equal(found.advantages, expected.advantages)
    assert found.metrics == expected.metrics and not found.advantages[2].any()
