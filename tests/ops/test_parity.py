"""How far two computations of the same log-probs may be apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mmrl.ops.parity import LIMITS, Gap


def test_a_gap_by_hand():
    gap = Gap.between([np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.5, -2.0]), np.array([-2.0])])
    assert gap.abs_mean == pytest.approx(0.5) and gap.abs_max == 1.0
    assert gap.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.e - 2) / 3)


def test_no_tokens_are_no_gap():
    assert Gap.between([], []) == Gap.between([np.zeros(0)], [np.zeros(0)]) == Gap(0.0, 0.0, 0.0, 0.0)


def test_a_tiny_gap_keeps_its_kl():
    gap = Gap.between([np.zeros(1)], [np.full(1, 1e-6)])
    assert gap.kl == pytest.approx(5e-13, rel=1e-3)


def test_a_huge_gap_does_not_overflow():
    gap = Gap.between([np.array([-800.0])], [np.array([0.0])])
    assert math.isfinite(gap.kl) and gap.verdict(LIMITS["bfloat16"]) == "stop"


def test_the_99th_percentile_shows_a_few_wrong_rows_and_forgives_one():
    few, one = np.zeros(1000), np.zeros(1000)
    few[:15], one[0] = 2.0, 30.0
    assert Gap.between([np.zeros(1000)], [few]).verdict(LIMITS["bfloat16"]) == "stop"
    assert Gap.between([np.zeros(1000)], [one]).verdict(LIMITS["bfloat16"]) == "warn"


@pytest.mark.parametrize(
    ("precision", "mean", "p99", "largest", "verdict"),
    [
        ("float32", 2e-7, 1e-6, 2e-6, "ok"),
        ("float32", 2e-5, 4e-5, 5e-5, "warn"),
        ("float32", 2e-7, 1e-6, 2e-4, "ok"),
        ("float32", 2e-7, 1e-6, 2e-3, "stop"),
        ("float32", 2e-6, 2e-4, 2e-4, "stop"),
        ("float32", 2e-4, 2e-4, 2e-4, "stop"),
        ("bfloat16", 2e-3, 2e-2, 3.0, "ok"),
        ("bfloat16", 3e-2, 2e-1, 3.0, "warn"),
        ("bfloat16", 1e-1, 2e-1, 2e-1, "stop"),
        ("bfloat16", 2e-3, 6e-1, 3.0, "stop"),
    ],
)
def test_verdicts_by_precision(precision, mean, p99, largest, verdict):
    assert Gap(mean, p99, largest, 0.0).verdict(LIMITS[precision]) == verdict


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("noise", [Gap(0.0, 0.0, 0.0, 0.0), Gap(1e-9, 1e-8, 1e-8, 0.0), Gap(*[math.nan] * 4)])
def test_little_noise_widens_no_limit(precision, noise):
    assert LIMITS[precision].widened(noise) == LIMITS[precision]


def test_limits_are_multiples_of_the_noise():
    wide = LIMITS["bfloat16"].widened(Gap(0.034, 0.15, 0.26, 0.0))
    assert (wide.mean_warn, wide.mean_stop, wide.p99_stop) == pytest.approx((0.068, 0.102, 0.5))
    wide = LIMITS["float32"].widened(Gap(2.7e-6, 1.4e-5, 5e-5, 0.0))
    assert (wide.mean_warn, wide.mean_stop, wide.p99_stop, wide.max_stop) == pytest.approx(
        (2.7e-5, 1e-4, 4.2e-4, 1.5e-3)
    )


def test_the_factor_between_probabilities_by_hand():
    gap = Gap.between([np.zeros(2)], [np.array([0.2, -0.4])])
    assert gap.ratio == pytest.approx((math.exp(0.2) + math.exp(0.4)) / 2)


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_gap_that_is_not_finite_stops(precision, value):
    assert Gap.between([np.zeros(1)], [np.full(1, value)]).verdict(LIMITS[precision]) == "stop"


def test_lengths_that_differ_are_a_bug():
    with pytest.raises(ValueError, match="broadcast"):
        Gap.between([np.zeros(3)], [np.zeros(2)])
