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
    assert Gap.between([], []) == Gap.between([np.zeros(0)], [np.zeros(0)]) == Gap(0.0, 0.0, 0.0)


def test_a_tiny_gap_keeps_its_kl():
    gap = Gap.between([np.zeros(1)], [np.full(1, 1e-6)])
    assert gap.kl == pytest.approx(5e-13, rel=1e-3)


def test_a_huge_gap_does_not_overflow():
    gap = Gap.between([np.array([-800.0])], [np.array([0.0])])
    assert math.isfinite(gap.kl) and gap.verdict("bfloat16") == "stop"


@pytest.mark.parametrize(
    ("precision", "mean", "largest", "verdict"),
    [
        ("float32", 2e-7, 2e-6, "ok"),
        ("float32", 2e-5, 5e-5, "warn"),
        ("float32", 2e-7, 2e-4, "stop"),
        ("float32", 2e-4, 2e-4, "stop"),
        ("bfloat16", 2e-3, 5e-1, "ok"),
        ("bfloat16", 3e-2, 5e-1, "warn"),
        ("bfloat16", 1e-1, 1e-1, "stop"),
    ],
)
def test_verdicts_by_precision(precision, mean, largest, verdict):
    assert Gap(mean, largest, 0.0).verdict(precision) == verdict


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gap_that_is_not_finite_stops(precision, value):
    assert Gap.between([np.zeros(1)], [np.full(1, value)]).verdict(precision) == "stop"


def test_lengths_that_differ_are_a_bug():
    with pytest.raises(ValueError, match="broadcast"):
        Gap.between([np.zeros(3)], [np.zeros(2)])
