"""Estimates from a sample of completions: means with intervals, pass@k, majority@k; pure functions in float64.

Shape letters: ``N`` values, ``n`` completions of one prompt. Values of one prompt are not independent of each other,
so intervals count prompts, not completions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.types import FloatArray, IntArray

Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval.

    Attributes:
        low: None where nothing can be said: there are no values, one prompt only, or values that are all equal and
            neither 0 nor 1.
        high: As ``low``.
    """

    value: float
    low: float | None = None
    high: float | None = None


def score_estimate(values: FloatArray, clusters: IntArray) -> Estimate:
    """The mean of scores and an interval: ``wilson_interval`` for one 0/1 score per cluster, else ``mean_estimate``.

    Scores that are all 0, or all 1, get Wilson's interval for as many as there are clusters: their spread, 0, says
    nothing, and a cluster is worth one score at least.

    Args:
        values: (N,) finite.
        clusters: (N,) the prompt of each.
    """
    values, num_clusters = np.asarray(values, np.float64), len(np.unique(clusters))
    is_binary = len(values) > 0 and bool(np.isin(values, (0.0, 1.0)).all())
    if is_binary and (num_clusters == len(values) or np.ptp(values) == 0):
        return Estimate(float(values.mean()), *wilson_interval(float(values.mean()), num_clusters))
    return mean_estimate(values, clusters)


def mean_estimate(values: FloatArray, clusters: IntArray) -> Estimate:
    """The mean, and the normal interval of ``clustered_error``; 0 without values."""
    values = np.asarray(values, np.float64)
    if not len(values):
        return Estimate(0.0)
    mean, error = float(values.mean()), clustered_error(values, clusters)
    return Estimate(mean, mean - Z * error, mean + Z * error) if error > 0 else Estimate(mean)


def clustered_error(values: FloatArray, clusters: IntArray) -> float:
    """Standard error of the mean of values that are alike within clusters; 0 for less than two clusters.

    ``sqrt(G / (G - 1) * sum_g (sum_{i in g} (x_i - mean))^2) / N`` for ``G`` clusters: Liang and Zeger, "Longitudinal
    data analysis using generalized linear models", Biometrika 73 (1986); for evaluations Miller, arXiv:2411.00640,
    section 2.2. The factor makes it the usual ``s / sqrt(N)`` where each cluster has one value.
    """
    values = np.asarray(values, np.float64)
    _, places = np.unique(clusters, return_inverse=True)
    sums = np.bincount(places, weights=values - values.mean()) if len(values) else np.zeros(0)
    count = len(sums)
    if count < 2 or np.ptp(values) == 0:
        return 0.0
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of ``count`` independent trials: Wilson, JASA 22 (1927), without correction."""
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that one of ``k`` completions is right, estimated without bias from ``num_samples`` of them.

    ``1 - C(n - c, k) / C(n, k)``: Chen et al., arXiv:2107.03374, equation 1.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    if num_samples - num_right < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(num_samples - num_right + 1, num_samples + 1)))


def best_of_n(chosen_by: FloatArray, values: FloatArray, most: int) -> FloatArray:
    """(most,) the expected value of the best of n completions, drawn from all N without replacement, for n = 1, 2, ...

    The best one is that of the highest score; completions that tie for it are chosen with equal chances. Each is the
    mean over every subset of size n, so it has no bias: ``sum_i C(i - 1, n - 1) / C(N, n) v_(i)`` for values in the
    order of their scores (Nakano et al., arXiv:2112.09332; Gao et al., arXiv:2210.10760).

    A block of equal scores that ends at place ``u`` and begins after place ``l`` has the weight ``q(u) - q(l)``, with
    ``q(u) = C(u, n) / C(N, n)``, and the mean of its values: by symmetry each of its completions is chosen as often.
    With scores that are the values, 0 or 1, this is ``pass_at_k``.

    Args:
        chosen_by: (N,) the score of each completion, by which the best one is chosen.
        values: (N,) the value of each.
        most: At most N.
    """
    scores, values = np.asarray(chosen_by, np.float64), np.asarray(values, np.float64)
    assert len(scores) == len(values) and 1 <= most <= len(scores)
    _, blocks, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    means = np.bincount(blocks, weights=values) / sizes
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.float64)
    shares, expected = np.ones(len(ends)), np.zeros(most)
    for drawn in range(most):  # q of one completion more
        shares = shares * np.maximum(ends - drawn, 0) / (len(scores) - drawn)
        expected[drawn] = np.diff(shares) @ means
    return expected


def majority_at_k(answers: Sequence[Hashable | None], scores: FloatArray, k: int) -> float:
    """The expected score of the answer that most of ``k`` completions give, drawn from all of them without replacement.

    Self-consistency (Wang et al., arXiv:2203.11171), averaged over every subset of size ``k`` rather than over the
    first: the estimate of least variance, as ``pass_at_k`` is. Answers that tie for the most votes are chosen with
    equal chances. An answer's score is the mean over the completions in the subset that give it. Completions without an
    answer (None) do not vote; a subset in which nobody votes has the mean of its scores.

    Args:
        answers: n, equal ones are the same answer.
        scores: (n,) each completion's.
        k: At most n.

    The subsets are not listed: with ``p = k / n``, the votes for each answer are drawn from binomial distributions,
    independently, and their sum is then conditioned on being ``k``, which is the same as drawing without replacement.
    """
    scores = np.asarray(scores, np.float64)
    assert len(answers) == len(scores) and 1 <= k <= len(answers)
    votes: dict[Hashable, list[float]] = {}
    silent = [score for answer, score in zip(answers, scores, strict=True) if answer is None]
    for answer, score in zip(answers, scores.tolist(), strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(score)
    counts = {answer: len(given) for answer, given in votes.items()}
    means = {answer: float(np.mean(given)) for answer, given in votes.items()}
    share = k / len(answers)
    nobody = _binomial(len(silent), share)[: k + 1]
    total = _binomial(len(answers), share)[k]
    expected = (
        nobody[k] * (1 - share) ** (len(answers) - len(silent)) * float(np.mean(silent)) if len(silent) >= k else 0.0
    )
    for top in range(1, min(k, max(counts.values(), default=0)) + 1):
        expected += _won_with(top, k, counts, means, nobody, share)
    return float(expected / total)


def _won_with(
    top: int, k: int, counts: Mapping[Hashable, int], means: Mapping[Hashable, float], nobody: FloatArray, share: float
) -> float:
    """The expected score where the winners have ``top`` votes each, times the chance of that and of ``k`` in all.

    Answer by answer, for each number of completions drawn and of answers with ``top`` votes: the chance, and the chance
    times the sum of these answers' scores.
    """
    most_ties = k // top
    chance, score = np.zeros((k + 1, most_ties + 1)), np.zeros((k + 1, most_ties + 1))
    chance[: len(nobody), 0] = nobody
    for answer, count in counts.items():
        odds = _binomial(count, share)[: top + 1]
        before, scored = chance, score
        chance, score = np.zeros_like(before), np.zeros_like(scored)
        for drawn, odd in enumerate(odds[:top]):
            chance[drawn:] += odd * before[: k + 1 - drawn]
            score[drawn:] += odd * scored[: k + 1 - drawn]
        if len(odds) > top:
            joined, rest = odds[top] * before[: k + 1 - top, :-1], odds[top] * scored[: k + 1 - top, :-1]
            chance[top:, 1:] += joined
            score[top:, 1:] += rest + means[answer] * joined
    return float((score[k, 1:] / np.arange(1, most_ties + 1)).sum())


def _binomial(count: int, share: float) -> FloatArray:
    """(count + 1,) chances of so many successes in ``count`` trials."""
    if share >= 1:
        return np.concatenate([np.zeros(count), np.ones(1)])
    places = np.arange(count + 1)
    logs = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(count + 1)]
    chances: FloatArray = np.exp(np.array(logs) + places * math.log(share) + (count - places) * math.log1p(-share))
    return chances
