"""Learning from tokens that older weights have sampled: on bandits whose gradient can be enumerated, by real losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mmrl.interfaces import RunFacts
from mmrl.plugin_host import registry
from mmrl.policy_gradient import PolicyGradient
from mmrl.testing import replay

UNBOUNDED = 1e9
SAMPLER = np.array([0.9, -0.3, 0.1])
OLD = np.array([0.2, 0.3, -0.4])
NOW = np.array([0.1, 0.45, -0.5])
TEACHER = np.array([-0.6, 0.5, 0.2])
REWARDS = np.array([1.0, 0.2, -0.7])
GROUP = 2
SMALL = 1e-6


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)


@dataclass(frozen=True)
class Case:
    """An algorithm whose estimate is a known multiple of the gradient.

    Attributes:
        scale: The multiple.
        more: What a batch of it has beside log-probs and rewards, from the arms.
        rewards: Each arm's reward in the gradient that it estimates, from the policy before the step.
    """

    name: str
    scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[np.ndarray], Mapping[str, Any]] = lambda arms: {}
    rewards: Callable[[np.ndarray], np.ndarray] = lambda old: REWARDS

    def __str__(self) -> str:
        return self.name


def relative(name: str, **options: Any) -> Case:
    """One that divides by the group's deviation, here by a constant that hides it, so that its estimate is exact."""
    return Case(name, (GROUP - 1) / GROUP * SMALL, {"std_eps": 1 / SMALL, **options})


WIDE = {"clip_low": 0.99, "clip_high": 99.0}
CASES = [
    Case("rloo"),
    Case("rloo", options={"loss": "ppo_clip", **WIDE}),
    Case("dr_grpo", (GROUP - 1) / GROUP, WIDE),
    Case("remax", more=lambda arms: {"greedy_rewards": np.full(len(arms), 0.3)}),
    relative("grpo", **WIDE),
    relative("dapo", dynamic_sampling=None, **WIDE),
    relative("gspo", **WIDE),
    relative("gspo_token", **WIDE),
    relative("gmpo", clip_low=9.0, clip_high=9.0),
    relative("cispo", ratio_max=99.0),
    relative("sapo"),
    relative("noisy_rollout", **WIDE),
    Case(
        "ppo",
        options={"whiten": False, **WIDE},
        more=lambda arms: {"values": np.full((len(arms), 1), 0.4), "vpreds": np.full((len(arms), 1), 0.4)},
    ),
    Case(
        "opd",
        options=WIDE,
        more=lambda arms: {"ref_log_probs": log_softmax(TEACHER)[arms][:, None]},
        rewards=lambda old: log_softmax(TEACHER) - log_softmax(old),
    ),
]
WITH_RATIO = [case for case in CASES if case.name not in ("remax", "sapo") and str(case.options) != "{}"]
"""Those whose ratio does not fade, and is no option that is off."""


def true_gradient(case: Case, old: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Of the expected reward, or of the KL to the teacher, by the logits."""
    probs, rewards = np.exp(log_softmax(now)), case.rewards(old)
    return probs * (rewards - probs @ rewards)


def estimate(
    case: Case, correction: Mapping[str, Any] | None, *, old: np.ndarray | None, now: np.ndarray
) -> np.ndarray:
    """The expected gradient of what is maximised, over all groups that the sampler can draw."""
    found = np.zeros(len(REWARDS))
    algorithm = registry.given("algorithm", case.name, {"kl": {"coef": 0.0}, **case.options, "correction": correction})
    logprobs, of_sampler = log_softmax(now), log_softmax(SAMPLER)
    for drawn in itertools.product(range(len(REWARDS)), repeat=GROUP):
        arms = np.array(drawn)
        batch = {
            "group_ids": np.zeros(GROUP, int),
            "rewards": REWARDS[arms],
            "response_mask": np.ones((GROUP, 1), bool),
            "log_probs": logprobs[arms][:, None],
            "rollout_log_probs": of_sampler[arms][:, None],
            "max_len": 1,
            **({} if old is None else {"old_log_probs": log_softmax(old)[arms][:, None]}),
            **case.more(arms),
        }
        if case.name == "opd" and old is None:  # it asks for them
            batch["old_log_probs"] = batch["log_probs"]
        gradient = replay(algorithm, batch).grad_log_probs[:, 0]
        by_logits = np.eye(len(REWARDS))[arms] - np.exp(logprobs)
        found -= np.exp(of_sampler[arms].sum()) * gradient @ by_logits
    return found / case.scale


def bias(*args: Any, **named: Any) -> float:
    case, correction = args
    truth = true_gradient(case, named["now"] if named["old"] is None else named["old"], named["now"])
    return float(np.linalg.norm(estimate(case, correction, **named) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_an_untruncated_correction_the_estimate_from_older_weights_is_not_biased(case: Case) -> None:
    """One optimizer step on a batch: the policy that learns is the one that the correction leads to."""
    plain, bounded, exact = (
        bias(case, correction, old=None, now=OLD)
        for correction in (
            None,
            {"mode": "token-truncate", "high": 1.3},
            {"mode": "token-truncate", "high": UNBOUNDED},
        )
    )
    assert plain > 0.2 and exact < 1e-5
    assert 0.02 < bounded < 0.9 * plain


@pytest.mark.parametrize("case", WITH_RATIO, ids=str)
def test_with_several_updates_the_ratio_is_to_the_policy_before_the_step_and_the_correction_from_there(
    case: Case,
) -> None:
    named = {"old": OLD, "now": NOW}
    exact = {"mode": "seq-truncate", "high": UNBOUNDED}
    assert bias(case, exact, **named) < 1e-5 < 0.2 < bias(case, None, **named)


FIRST = np.array([0.4, -0.2]), np.array([-0.1, 0.3])
THEN = np.array([[0.3, -0.1], [-0.7, 0.2]]), np.array([[-0.6, 0.8], [0.4, -0.5]])
"""The policy that learns and the one that sampled: logits of the first of two tokens, and of the second one by it."""
TREE = np.array([[1.0, -0.4], [0.1, 0.6]])
"""Rewards of completions of two tokens."""


def two_token_estimate(correction: Mapping[str, Any] | None) -> np.ndarray:
    """``rloo``'s expected gradient by all logits of the policy, over all pairs of completions."""
    algorithm = registry.given("algorithm", "rloo", {"kl": {"coef": 0.0}, "correction": correction})
    paths = list(itertools.product(range(2), repeat=2))
    now, sampler = (
        np.array([[log_softmax(first)[a], log_softmax(then[a])[b]] for a, b in paths])
        for first, then in zip(FIRST, THEN, strict=True)
    )
    found = np.zeros(6)
    for pair in itertools.product(range(len(paths)), repeat=GROUP):
        rows = list(pair)
        batch = {
            "group_ids": np.zeros(GROUP, int),
            "rewards": np.array([TREE[paths[row]] for row in rows]),
            "response_mask": np.ones((GROUP, 2), bool),
            "log_probs": now[rows],
            "rollout_log_probs": sampler[rows],
        }
        gradient = replay(algorithm, batch).grad_log_probs
        found -= np.exp(sampler[rows].sum()) * sum(
            by_logits(paths[row], gradient[place]) for place, row in enumerate(rows)
        )
    return found


def by_logits(path: tuple[int, int], gradient: np.ndarray) -> np.ndarray:
    first, then = path
    found = np.zeros((3, 2))
    found[0] = gradient[0] * (np.eye(2)[first] - np.exp(log_softmax(FIRST[0])))
    found[1 + first] = gradient[1] * (np.eye(2)[then] - np.exp(log_softmax(THEN[0][first])))
    return found.ravel()


def test_of_completions_of_several_tokens_the_whole_ones_weight_is_exact_and_a_tokens_own_is_in_between() -> None:
    p_first, p_then = np.exp(log_softmax(FIRST[0])), np.exp(np.array([log_softmax(row) for row in THEN[0]]))
    value_A = (p_then * TREE).sum(1)
    truth = np.concatenate([p_first * (value_A - p_first @ value_A),
                            (p_first[:, None] * p_then * (TREE - value_A[:, None])).ravel()])  # fmt: skip
    plain, token, whole = (
        float(np.linalg.norm(two_token_estimate(correction) - truth))
        for correction in (
            None,
            {"mode": "token-truncate", "high": UNBOUNDED},
            {"mode": "seq-truncate", "high": UNBOUNDED},
        )
    )
    assert whole < 1e-6 < 0.02 < token < plain


def policy_gradients() -> list[str]:
    """The installed algorithms that have ``correction``."""
    names = [info.name for info in registry.list_plugins() if info.kind == "algorithm"]
    return [name for name in names if issubclass(registry.resolve("algorithm", name), PolicyGradient)]


def lagging(seed: int = 0) -> dict[str, Any]:
    """Four groups of four ragged completions; old, current and sampler's log-probs are all different."""
    rng = np.random.default_rng(seed)
    mask = np.arange(6) < rng.integers(2, 7, (16, 1))
    old = -rng.random((16, 6)) - 0.1
    turns = np.minimum(np.cumsum(rng.random((16, 6)) < 0.4, axis=1), 1)
    counts = [int(turns[row, mask[row]].max()) + 1 for row in range(16)]
    return {
        "group_ids": np.arange(16) % 4,
        "rewards": rng.integers(0, 3, 16) / 2.0,
        "greedy_rewards": np.arange(16) % 4 / 4,
        "response_mask": mask,
        "log_probs": old + rng.normal(0, 0.02, old.shape),
        "old_log_probs": old,
        "rollout_log_probs": old + rng.normal(0, 0.4, old.shape),
        "ref_log_probs": old + rng.normal(0, 0.3, old.shape),
        "values": rng.random(old.shape),
        "vpreds": rng.random(old.shape),
        "entropy": rng.random(old.shape),
        "max_len": 6,
        "turns": np.where(mask, turns, 0),
        "turn_rewards": [np.zeros(count) for count in counts],
        "turn_states": [["begin", "later"][:count] for count in counts],
        "views": {"masked": {"log_probs": old - 0.2, "entropy": rng.random(old.shape)}},
    }


@pytest.mark.parametrize("name", policy_gradients())
def test_the_correction_multiplies_each_tokens_policy_gradient_and_moves_no_advantage(name: str) -> None:
    """What an estimate is under newer weights; whatever its ratio is, and however it is clipped to the old policy."""
    data, options = lagging(), {"kl": {"coef": 0.0}}
    options |= {"perception_coef": 0.0, "entropy_own_coef": 0.0, "entropy_masked_coef": 0.0} if name == "papo" else {}
    options |= {"clip_low": 0.5, "clip_high": 0.5} if name == "gspo" else {}
    plain = replay(name, data, options=options)
    bound = {"mode": "token-truncate", "high": UNBOUNDED}
    corrected = replay(name, data, options={**options, "correction": bound})
    weight = np.exp(data["old_log_probs"] - data["rollout_log_probs"])
    assert np.array_equal(plain.advantages, corrected.advantages)
    if name in ("gspo", "gmpo"):  # the loss of a sequence stands on each of its tokens
        lengths = data["response_mask"].sum(1, keepdims=True)
        weight = np.broadcast_to((weight * data["response_mask"]).sum(1, keepdims=True) / lengths, weight.shape)
    assert np.abs(plain.grad_log_probs).max() > 0
    assert corrected.grad_log_probs == pytest.approx(plain.grad_log_probs * weight, rel=1e-6, abs=1e-9)  # float32


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "ppo", "opd", "reinforce_pp", "gigpo", "raft_pp"])
def test_a_token_is_clipped_by_its_ratio_to_the_policy_before_the_step_and_not_to_the_one_that_sampled(
    name: str,
) -> None:
    data, options = lagging(), {"kl": {"coef": 0.0}, "clip_low": 0.2, "clip_high": 0.2}
    # A policy that is at the sampler's log-probs, which are far from the old policy's for most tokens.
    far = replay(name, data | {"log_probs": data["rollout_log_probs"]}, options=options)
    ratio = np.exp(data["rollout_log_probs"] - data["old_log_probs"])
    advantages = far.advantages if far.advantages.ndim == 2 else np.repeat(far.advantages[:, None], 6, 1)
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    learned = data["response_mask"] & (far.sequence_weights > 0)[:, None] & (advantages != 0)
    assert (learned & clipped).sum() > 5 and (learned & ~clipped).sum() > 5
    assert np.array_equal(far.grad_log_probs[learned] != 0, ~clipped[learned])
    # One that is at the old policy's is clipped nowhere, however far the sampler's is.
    near = replay(name, data | {"log_probs": data["old_log_probs"]}, options=options)
    assert near.grad_log_probs[learned].all()


RUN = RunFacts(8, 4, 16, updates_per_batch=1, rewards=("right", "environment"), accuracy="right")


@pytest.mark.parametrize("name", policy_gradients())
def test_a_run_whose_sampler_is_behind_is_told_once_that_nothing_corrects_for_it(name: str) -> None:
    def told(correction: Any, **facts: Any) -> list[str]:
        algorithm = registry.given("algorithm", name, {"correction": correction})
        return [each for each in algorithm.check(replace(RUN, **facts)) if "older weights" in each]

    of_view = [f"correction leaves alone what is sampled from view {'noised'!r}"] * (name == "noisy_rollout")
    for facts in ({"staleness": 1}, {"partial": True}):
        first, *others = told(None, **facts)
        assert "without correction the gradient is biased" in first and len(others) == len(of_view)
        assert len(told({"mode": "token-truncate"}, **facts)) == len(of_view)
    assert told(None) == told({"mode": "token-truncate"}) == []
