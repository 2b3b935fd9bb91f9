"""Estimators against hand calculations, all subsets, other implementations, and what intervals promise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest

from mmrl.ops.estimation import (
    Z,
    best_of_n,
    clustered_error,
    majority_at_k,
    mean_estimate,
    pass_at_k,
    score_estimate,
    wilson_interval,
)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)  # 3 of the 6 pairs hold the right one
    assert pass_at_k(5, 2, 3) == pytest.approx(9 / 10)  # 1 of 10 triples has none of the two
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4), pass_at_k(4, 4, 1)) == (0.0, 1.0, 1.0)


def test_pass_at_k_is_the_mean_over_all_subsets():
    for right in range(7):
        scores = [1.0] * right + [0.0] * (6 - right)
        for k in range(1, 7):
            subsets = [max(subset) for subset in combinations(scores, k)]
            assert pass_at_k(6, right, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_pass_at_k_of_thousands_is_a_number():
    assert pass_at_k(4096, 1, 2048) == pytest.approx(0.5)


def chosen(scores: Sequence[float], values: Sequence[float], subset: Sequence[int]) -> float:
    """The mean value of the subset's completions with the highest score."""
    best = max(scores[place] for place in subset)
    return float(np.mean([values[place] for place in subset if scores[place] == best]))


@pytest.mark.parametrize("kinds", [1, 2, 3, 100])
def test_the_best_of_n_is_the_mean_over_all_subsets(kinds):
    """Scores of so many kinds tie for the highest with each other, or seldom do."""
    rng = np.random.default_rng(kinds)
    for size in range(1, 8):
        scores, values = rng.integers(0, kinds, size).astype(float), rng.normal(size=size)
        expected = [
            np.mean([chosen(scores, values, s) for s in combinations(range(size), n)]) for n in range(1, size + 1)
        ]
        assert best_of_n(scores, values, size) == pytest.approx(np.array(expected), abs=1e-12)


def test_the_best_of_n_by_hand():
    assert best_of_n(np.array([1.0, 2.0, 3.0]), np.array([5.0, 0.0, 2.0]), 3).tolist() == pytest.approx(
        [7 / 3, 4 / 3, 2]
    )
    right = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    assert best_of_n(right, right, 5) == pytest.approx([pass_at_k(5, 2, k) for k in range(1, 6)])
    many = np.arange(4096.0)
    assert best_of_n(many, many, 4096)[[0, 1, 4095]] == pytest.approx([2047.5, (2 * 4096 - 1) / 3, 4095])


def test_majority_at_k_by_hand():
    # 2 of 3 are right: any pair that holds both is right, the other two tie.
    assert majority_at_k(["a", "a", "b"], np.array([1.0, 1.0, 0.0]), 1) == pytest.approx(2 / 3)
    assert majority_at_k(["a", "a", "b"], np.array([1.0, 1.0, 0.0]), 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_at_k(["a", "a", "b"], np.array([1.0, 1.0, 0.0]), 3) == 1.0
    # One that says nothing does not outvote one that does; where nobody votes, there are the scores themselves.
    assert majority_at_k([None, None, "a"], np.array([0.0, 0.0, 1.0]), 3) == 1.0
    assert majority_at_k([None, None], np.array([0.0, 0.5]), 2) == pytest.approx(0.25)


def by_listing(answers, scores, k):
    """The definition, subset by subset."""
    values = []
    for subset in combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        if not votes:
            values.append(np.mean([scores[i] for i in subset]))
            continue
        tied = [answer for answer, count in votes.items() if count == max(votes.values())]
        means = [np.mean([scores[i] for i in subset if answers[i] == answer]) for answer in tied]
        values.append(np.mean(means))
    return np.mean(values)


@pytest.mark.parametrize("seed", range(12))
def test_majority_at_k_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 10))
    answers = [rng.choice(["a", "b", "c", "d", None], p=[0.3, 0.25, 0.2, 0.1, 0.15]) for _ in range(count)]
    scores = rng.random(count) if seed % 2 else np.array([float(answer == "a") for answer in answers])
    for k in range(1, count + 1):
        assert majority_at_k(answers, scores, k) == pytest.approx(by_listing(answers, scores, k), abs=1e-12)


def test_majority_at_k_of_many_completions_agrees_with_drawing():
    rng = np.random.default_rng(0)
    answers = [str(i) for i in rng.choice(6, 64, p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1])]
    scores = np.array([float(answer == "1") for answer in answers])
    drawn = []
    for _ in range(20_000):
        subset = rng.choice(64, 16, replace=False)
        votes = Counter(answers[i] for i in subset)
        tied = [answer for answer, count in votes.items() if count == max(votes.values())]
        drawn.append(np.mean([answer == "1" for answer in tied]))
    assert majority_at_k(answers, scores, 16) == pytest.approx(np.mean(drawn), abs=0.015)


def test_the_clustered_error_by_hand():
    # Two prompts with two scores each: deviations from 0.5 sum to 1 and -1, so sqrt(2 / 1 * 2) / 4.
    assert clustered_error(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1])) == pytest.approx(0.5)
    # Within the prompts all is as different as can be, between them nothing is.
    assert clustered_error(np.array([1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1])) == 0.0


def test_the_error_of_clusters_of_one_is_the_usual_one():
    values = np.random.default_rng(1).normal(size=50)
    usual = values.std(ddof=1) / math.sqrt(50)
    assert clustered_error(values, np.arange(50)) == pytest.approx(usual)
    estimate = mean_estimate(values, np.arange(50))
    assert (estimate.low, estimate.high) == pytest.approx((values.mean() - Z * usual, values.mean() + Z * usual))


def test_the_clustered_error_is_that_of_the_prompts_means():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(30, 8)) + rng.normal(size=(30, 1))
    clusters = np.repeat(np.arange(30), 8)
    usual = values.mean(1).std(ddof=1) / math.sqrt(30)
    assert clustered_error(values.ravel(), clusters) == pytest.approx(usual)
    order = rng.permutation(240)
    assert clustered_error(values.ravel()[order], clusters[order]) == pytest.approx(usual)


def test_intervals_hold_the_truth_95_times_in_100():
    rng = np.random.default_rng(3)
    held = [0, 0]
    for _ in range(1000):
        chances = rng.beta(1, 1, 100)
        sampled = (rng.random((100, 4)) < chances[:, None]).astype(float)
        estimate = score_estimate(sampled.ravel(), np.repeat(np.arange(100), 4))
        single = score_estimate(sampled[:, 0], np.arange(100))
        held[0] += estimate.low <= 0.5 <= estimate.high
        held[1] += single.low <= 0.5 <= single.high
    assert all(930 <= count <= 970 for count in held)


def test_wilsons_interval_solves_its_equation():
    assert NormalDist().inv_cdf(0.975) == pytest.approx(Z, abs=1e-12)
    for share, count in ((0.3, 10), (0.0, 5), (1.0, 7), (0.5, 1000)):
        for end in wilson_interval(share, count):
            assert (share - end) ** 2 == pytest.approx(Z**2 * end * (1 - end) / count, abs=1e-12)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)  # Z^2 / (n + Z^2)


def test_single_right_or_wrong_scores_have_wilsons_interval_and_others_the_normal_one():
    binary, clusters = np.array([1.0, 0.0, 1.0, 1.0]), np.arange(4)
    found = score_estimate(binary, clusters)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.75, 4))
    assert score_estimate(binary / 2, clusters) == mean_estimate(binary / 2, clusters)
    assert score_estimate(np.repeat(binary, 2), np.repeat(clusters, 2)) == mean_estimate(
        np.repeat(binary, 2), np.repeat(clusters, 2)
    )
    all_right = score_estimate(np.ones(8), np.repeat(clusters, 2))
    assert (all_right.low, all_right.high) == pytest.approx(wilson_interval(1.0, 4))


def test_what_cannot_be_estimated_has_no_interval():
    for values, clusters in (([], []), ([0.3], [0]), ([0.3, 0.4], [0, 0]), ([0.3, 0.3], [0, 1])):
        found = score_estimate(np.array(values), np.array(clusters, np.int64))
        assert found.low is None and found.high is None
        assert found.value == pytest.approx(np.mean(values) if values else 0.0)
