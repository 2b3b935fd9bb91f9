"""Accuracy under rewards of any scale, by hand."""

from __future__ import annotations

import io

import numpy as np
import pytest

from mmrl.commands.eval.estimates import estimates
from mmrl.ops.metrics import evaluation_metrics, reward_metrics
from mmrl.rollout.batch import batch_of
from mmrl.system.console import Console
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import RolloutGroup, ScoredGroup

SCALES = {
    # name: (values of two prompts with four completions each, accuracy, mean, all right, all wrong)
    "0 and 1": ([[1, 0, 1, 0], [0, 0, 0, 0]], 0.25, 0.25, 0.0, 0.5),
    "0 and 1, all right": ([[1, 1, 1, 1], [1, 1, 1, 1]], 1.0, 1.0, 1.0, 0.0),
    "0.1 for a number, every answer wrong": ([[0.1, 0.1, 0.1, 0], [0.1, 0.1, 0.1, 0.1]], 0.0, 0.0875, 0.0, 1.0),
    "0.1 for a number, some right": ([[1, 0.1, 0.1, 0], [0.1, 0.1, 0.1, 0.1]], 0.125, 0.2, 0.0, 0.5),
    "-1 and 1": ([[1, -1, 1, -1], [-1, -1, -1, -1]], 0.25, -0.5, 0.0, 0.5),
    "-0.5, 0 and 1": ([[1, 0, -0.5, 0], [1, 1, 1, 1]], 0.625, 0.5625, 0.5, 0.0),
    "IoU": ([[0.9, 0.7, 1.0, 0.0], [0.6, 0.5, 0.4, 0.3]], 0.125, 0.55, 0.0, 0.5),
    "1 and a bonus": ([[1.2, 1.0, 0.2, 0], [1.2, 1.2, 1.0, 1.0]], 0.75, 0.85, 0.5, 0.0),
    "0 and 10": ([[10, 0, 0, 0], [0, 0, 0, 0]], 0.125, 1.25, 0.0, 0.5),
    "0 and 0.5, which is never 1": ([[0.5, 0.5, 0, 0], [0, 0, 0, 0]], 0.0, 0.125, 0.0, 1.0),
    "some unscored": ([[1, np.nan, 0.5, np.nan], [np.nan] * 4], 0.5, 0.75, 0.0, 0.0),
}


def groups(values: list[list[float]]) -> list[ScoredGroup]:
    found = []
    for place, row in enumerate(values):
        scores = np.array(row, np.float64)
        rollouts = tuple(make_rollouts(["a"] * len(row), question=f"p{place}"))
        group = RolloutGroup(rollouts[0].prompt, rollouts)
        found.append(ScoredGroup(group, np.nan_to_num(scores), ~np.isnan(scores), {"score": scores}))
    return found


@pytest.mark.parametrize("scale", SCALES)
def test_accuracy_is_the_share_of_value_1_and_the_mean_is_told_beside_it(scale: str) -> None:
    values, accuracy, mean, all_right, all_wrong = SCALES[scale]
    scored = groups(values)
    batch = batch_of(scored, {"score": 1.0}, frozenset())
    found = evaluation_metrics(batch.rewards, batch.valid, batch.components, "score")
    assert (found["eval/accuracy"], found["eval/score_mean"]) == pytest.approx((accuracy, mean))
    sampled = reward_metrics(batch, "score")
    assert sampled["reward/score_mean"] == pytest.approx(mean)
    assert (sampled["group/all_correct_fraction"], sampled["group/all_wrong_fraction"]) == (all_right, all_wrong)
    estimate = estimates(scored, batch, {**found, "eval/length/completion_mean": 1.0}, "score")["eval/accuracy"]
    assert estimate.value == pytest.approx(accuracy)

    console = Console(9, stream := io.StringIO(), evaluated={"": ("eval/accuracy", "eval/score_mean")})
    console.step(3, found)
    is_graded = not {value for row in values for value in row if not np.isnan(value)} <= {0, 1}
    shown = f"eval {mean:.2f}  acc {accuracy:.2f}" if is_graded else f"acc {accuracy:.2f}"
    assert stream.getvalue() == f"step 3/9  {shown}\n"


def test_accuracy_of_values_0_and_1_is_their_mean_to_the_bit() -> None:
    for seed in range(20):
        values = (np.random.default_rng(seed).random((7, 9)) < 0.3).astype(np.float64)
        values[0, seed % 9] = np.nan
        batch = batch_of(groups(values.tolist()), {"score": 1.0}, frozenset())
        found = evaluation_metrics(batch.rewards, batch.valid, batch.components, "score")
        assert found["eval/accuracy"] == found["eval/score_mean"] == float(np.nanmean(values))


def test_the_console_shows_the_mean_from_the_first_graded_evaluation_on() -> None:
    console = Console(9, stream := io.StringIO(), evaluated={"": ("eval/accuracy", "eval/iou_mean")})
    console.step(0, {"eval/accuracy": 0.0, "eval/iou_mean": 0.0})
    console.step(1, {"lr": 1.0})
    console.step(2, {"eval/accuracy": 0.0, "eval/iou_mean": 0.25})
    console.step(3, {"eval/accuracy": 1.0, "eval/iou_mean": 1.0})
    lines = ["acc 0.00", "", "eval 0.25  acc 0.00", "eval 1.00  acc 1.00"]
    assert stream.getvalue().splitlines() == [f"step {n}/9  {line}".strip() for n, line in enumerate(lines)]
