"""Algorithms that sample, leave out or weigh in their own way: runs with an environment and the fake engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.rollout.records import read_step, recorded_steps
from mmrl.runs.history import read_ledger
from mmrl.types import CreditedGroup, Rollout
from tests.faults.comparison import metrics
from tests.faults.runs import Runs

ENVIRONMENT = Path(__file__).parents[1] / "faults" / "slow_tools.py"


@pytest.fixture
def run(fake_runs: Runs) -> Any:
    """Trains two steps of three prompts with an algorithm and its options; answers the run's folder."""

    def train(name: str, **options: Any) -> Path:
        environment = {
            "name": f"{ENVIRONMENT}:SlowTools",
            "longest_s": 0.0,
            "max_turns": 3,
            "max_turn_tokens": 4,
            "max_observation_tokens": 120,
            "workers": 1,
        }
        config = fake_runs.config(
            "run",
            environment=environment,
            rewards=[{"name": "overlong", "max_tokens": 12, "cache_tokens": 6}],
            sampler={"group_size": 3, "max_new_tokens": 14},
            algorithm={"name": name, **options},
            learner={"minibatches": 1},
            trainer={"steps": 2, "prompts_per_step": 3, "run_dir": str(fake_runs.folder / "run")},
        )
        assert fake_runs.train(config) == 0
        return fake_runs.folder / "run"

    return train


def credited(run: Path) -> Iterator[tuple[int, CreditedGroup]]:
    """Each group of each step, with what it was worth."""
    for step, path in recorded_steps(run).items():
        for group in read_step(path).groups:
            yield step, group.credited


def learned(run: Path) -> Counter[tuple[Any, ...]]:
    """How often each (step, epoch, prompt, member) was learned from."""
    return Counter((each["step"], *sample) for each in read_ledger(run) for sample in each["samples"])


def worth(rollout: Rollout) -> float:
    """An episode's reward by hand: what the environment gave and found, and the penalty for many tokens."""
    given = sum(each.reward for each in rollout.episode) + rollout.components["reached"]
    return given - min(max((rollout.mask.sum() - 6) / 6, 0), 1)


def test_remax_compares_episodes_with_the_greedy_one(run: Any) -> None:
    path = run("remax", kl={"coef": 0.0})
    found, turns = learned(path), Counter[int]()
    for step, group in credited(path):
        assert group.scored.greedy is not None
        (greedy,) = group.scored.greedy.rollouts
        assert greedy.greedy and not found[step, *greedy.key]
        turns[len(greedy.episode)] += 1
        for rollout, reward, advantage in zip(
            group.scored.rollouts, group.scored.rewards, group.advantages, strict=True
        ):
            assert reward == pytest.approx(worth(rollout))
            np.testing.assert_allclose(advantage[rollout.mask], reward - worth(greedy), atol=1e-6)
            assert found[step, *rollout.key] == 1
    assert max(turns) > 1 and sum(turns.values()) == 6


def test_dapo_replaces_groups_whose_environment_tells_no_difference(run: Any) -> None:
    """Judged by a component of the environment; limits leave the loss, and equal samplers are weighed by 1."""
    options = {"dynamic_sampling": {"metric": "reached", "max_rounds": 20}, "mask_truncated": True}
    path = run("dapo", **options, correction={"mode": "seq-truncate"})
    found, kept, cut = learned(path), Counter[int](), 0
    sampled = Counter[int]()
    for step, group in credited(path):
        differs = len(set(group.scored.components["reached"])) > 1
        assert group.scored.kept == differs == group.trained
        kept[step], sampled[step] = kept[step] + differs, sampled[step] + 1
        for rollout in group.scored.rollouts:
            assert found[step, *rollout.key] == (differs and not rollout.truncated)
            cut += rollout.truncated and differs
    assert kept == {1: 3, 2: 3} and cut
    for step, line in metrics(path).items():
        if step:
            assert line["rollout/acceptance_rate"] == pytest.approx(3 / sampled[step])
            assert line["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert sum(sampled.values()) > 6 and max(line.get("rollout/rounds", 0) for line in metrics(path).values()) > 1


def test_one_constant_weighs_every_token_of_the_policy_alike_whatever_was_observed(run: Any) -> None:
    """By hand: minus the sum of advantages over the policy's tokens, over episodes times ``sampler.max_new_tokens``."""
    path = run("dr_grpo")
    lengths, lines = set[tuple[int, int]](), metrics(path)
    for step in (1, 2):
        groups = [group for at, group in credited(path) if at == step]
        sums, count = 0.0, 0
        for group in groups:
            for rollout, reward in zip(group.scored.rollouts, group.scored.rewards, strict=True):
                tokens = int(rollout.mask.sum())
                sums, count = sums + (reward - np.mean(group.scored.rewards)) * tokens, count + 1
                lengths.add((tokens, int((~rollout.mask).sum())))
        assert count == 9 and lines[step]["loss/policy"] == pytest.approx(-sums / (count * 14), abs=1e-6)
    assert len({observed for _, observed in lengths}) > 1 and len({tokens for tokens, _ in lengths}) > 1
