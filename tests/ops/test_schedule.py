"""Learning rates over a run."""

from __future__ import annotations

import pytest

from mmrl.ops.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_a_rise_over_two_steps_then_the_schedule(schedule, expected):
    rates = [learning_rate(s, peak=1.0, warmup_steps=2, total_steps=6, schedule=schedule) for s in range(6)]
    assert rates == pytest.approx(expected)


def test_without_warmup_the_first_step_has_the_peak():
    assert learning_rate(0, peak=3e-4, warmup_steps=0, total_steps=5, schedule="cosine") == 3e-4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_of_a_run_has_rate_zero(schedule):
    settings = {"peak": 1e-6, "warmup_steps": 3, "total_steps": 20, "schedule": schedule}
    assert min(learning_rate(step, **settings) for step in range(20)) > 0
