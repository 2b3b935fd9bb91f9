"""The branching ARPO against calculations by hand: surprise, probabilities of branches, and shared advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import Branches, RunFacts
from mmrl.testing import check_algorithm, make_rollouts
from mmrl.types import Batch, Branch, BranchedRows, PlayedTurn, Rollout, Segment, Turn
from mmrl_methods.arpo_entropy import EntropyARPO, turn_surprisals


def episode(index: int, *turns: list[float]) -> Rollout:
    """Turns whose tokens have these log-probs, each followed by an observation of two tokens."""
    (made,) = make_rollouts([f"episode {index}"])
    segments = list[Segment]()
    for turn in turns:
        segments.append(Segment(np.full(len(turn), index, np.int32), True, np.array(turn, np.float32)))
        segments.append(Segment(np.zeros(2, np.int32), False, np.zeros(2, np.float32), role="tool"))
    played = tuple(PlayedTurn(Turn("go", (), number, "stop", 9)) for number in range(len(turns)))
    return replace(made, index=index, segments=tuple(segments), episode=played)


def test_surprise_is_the_mean_of_the_first_tokens() -> None:
    """A turn that was cut and goes on is one turn."""
    made = episode(0, [-1.0, -3.0, -8.0], [], [-0.5])
    assert turn_surprisals(made, 2) == [2.0, 0.0, 0.5]
    cut = replace(made, segments=(made.segments[0], replace(made.segments[0], continues=True)))
    assert turn_surprisals(cut, 6) == [4.0]


def test_episodes_branch_before_turns_that_are_unsure() -> None:
    """Turn 1 of the first is 2 nats less sure than turn 0, and turn 2 is 2 nats surer: probabilities 1 and 0."""
    group = [episode(0, [-3.0], [-5.0], [-1.0]), episode(1, [-1.0])]
    options: dict[str, Any] = {"nats": 2.0, "entropy_weight": 0.5, "per_round": 1}
    found = EntropyARPO(EntropyARPO.Config(**options)).branch(group, 1)
    assert found == [Branch(0, 1)]


def test_probabilities_are_those_of_the_formula() -> None:
    """0.3 + 0.4 * 1/2 is 1/2 for turn 1 and 0.3 for turn 2, over many groups; the rest begins anew."""
    algorithm = EntropyARPO(EntropyARPO.Config(branch_probability=0.3, entropy_weight=0.4, nats=2.0))
    drawn = [algorithm.branch([episode(seed, [-1.0], [-2.0], [-1.0])], 2) for seed in range(400)]
    shares = [np.mean([Branch(0, turn) in found for found in drawn]) for turn in (1, 2)]
    np.testing.assert_allclose(shares, [0.5, 0.3], atol=0.08)
    assert all(len(found) == 2 and found.count(Branch(0, 0)) == 2 - sum(b.turn > 0 for b in found) for found in drawn)
    group = [episode(3, [-1.0], [-2.0], [-1.0])]
    assert algorithm.branch(group, 2) == algorithm.branch(group, 2)


def test_a_turn_that_episodes_share_is_tried_once() -> None:
    """The second episode goes on from the first before turn 1, so that only its turn 2 is its own."""
    first, second = episode(0, [-1.0], [-1.0], [-1.0]), episode(1, [-1.0], [-1.0], [-1.0])
    second = replace(second, branch=Branch(0, 1))
    found = EntropyARPO(EntropyARPO.Config(branch_probability=1.0)).branch([first, second], 8)
    assert {each for each in found if each.turn} == {Branch(0, 1), Branch(0, 2), Branch(1, 2)}


def batch() -> Batch:
    """Three episodes of one prompt: the second shares two tokens of four with the first."""
    rewards = np.array([1.0, 0.0, 0.0])
    return Batch(
        rewards=rewards,
        valid=np.ones(3, bool),
        group_ids=np.zeros(3, np.int64),
        masks=[np.ones(4, bool)] * 3,
        truncated=np.zeros(3, bool),
        components={"environment": rewards},
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[np.zeros(4)] * 3,
        branches=BranchedRows(np.array([-1, 0, -1]), np.array([0, 2, 0])),
    )


def test_shared_tokens_have_the_mean_of_their_episodes_advantages() -> None:
    """Rewards 1, 0, 0: (2/3, -1/3, -1/3) / sqrt(1/3), so 2a, -a, -a with a = 1/sqrt(3); shared tokens have a/2."""
    a = 1 / np.sqrt(3)
    hard = EntropyARPO(EntropyARPO.Config(attribution="hard")).credit(batch()).advantages
    expected = [[a / 2, a / 2, 2 * a, 2 * a], [a / 2, a / 2, -a, -a], [-a] * 4]
    np.testing.assert_allclose(np.stack(list(hard)), expected, rtol=1e-5)
    soft = EntropyARPO(EntropyARPO.Config()).credit(batch()).advantages
    np.testing.assert_allclose(soft, [2 * a, -a, -a], rtol=1e-5)


def test_a_group_has_episodes_that_begin_at_the_prompt() -> None:
    algorithm = EntropyARPO(EntropyARPO.Config(rounds=2, per_round=3))
    assert algorithm.needs().branches == Branches(rounds=2, per_round=3)
    facts = RunFacts(8, 1, 8, 1, rewards=("environment",))
    assert algorithm.check(facts) == ()
    with pytest.raises(ValueError, match=r"6 episodes of a group branch, and sampler\.group_size is 6"):
        algorithm.check(replace(facts, group_size=6))


def test_it_keeps_the_rules_of_algorithms() -> None:
    check_algorithm("arpo_entropy")
    check_algorithm("arpo_entropy", options={"attribution": "hard", "per_round": 1})
