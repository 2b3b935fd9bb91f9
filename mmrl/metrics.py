"""Numbers that describe a rollout batch, each by its formula; ``B`` rollouts, the means over valid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmrl.ops.credit import zero_signal_fraction
from mmrl.ops.parity import Gap
from mmrl.types import Batch, BoolArray, FloatArray


def reward_metrics(batch: Batch) -> dict[str, float]:
    """``reward/*`` and ``group/*``: rewards before any shaping by the algorithm.

    - ``reward/mean``, ``reward/std``: of the weighted sums over valid rollouts (std of the population).
    - ``reward/<name>_mean``: of each component's raw values.
    - ``reward/unscored_fraction``: rollouts that a reward could not score.
    - ``group/zero_signal_fraction``: groups whose valid rewards are all equal.
    """
    valid = batch.rewards[batch.valid]
    return {
        "reward/mean": _mean(valid),
        "reward/std": float(valid.std()) if len(valid) else 0.0,
        **{f"reward/{name}_mean": _mean(values[batch.valid]) for name, values in batch.components.items()},
        "reward/unscored_fraction": float(1 - batch.valid.mean()),
        "group/zero_signal_fraction": zero_signal_fraction(batch.rewards, batch.group_ids, batch.valid),
    }


def length_metrics(masks: Sequence[BoolArray], truncated: BoolArray) -> dict[str, float]:
    """``length/completion_mean`` and ``_max`` (all tokens after the prompt), and the share cut at the limit."""
    lengths = np.array([len(mask) for mask in masks])
    return {
        "length/completion_mean": float(lengths.mean()),
        "length/completion_max": float(lengths.max()),
        "length/truncated_fraction": float(truncated.mean()),
    }


def batch_metrics(batch: Batch, masks: Sequence[BoolArray], advantages: Sequence[FloatArray]) -> dict[str, float]:
    """``length/*``, and ``advantage/abs_mean``: mean of ``|A|`` over the tokens in the loss, which ``masks`` tells."""
    values = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)])
    return {**length_metrics(batch.masks, batch.truncated), "advantage/abs_mean": _mean(np.abs(values))}


def mismatch_metrics(gap: Gap) -> dict[str, float]:
    """``mismatch/*``: learner minus sampler, over the tokens that the policy wrote; see ``Gap``."""
    return {
        "mismatch/logprob_abs_mean": gap.abs_mean,
        "mismatch/logprob_abs_max": gap.abs_max,
        "mismatch/kl": gap.kl,
    }


def evaluation_metrics(
    rewards: FloatArray, valid: BoolArray, components: Mapping[str, FloatArray], accuracy_of: str
) -> dict[str, float]:
    """``eval/accuracy``: mean of the component ``accuracy_of``; ``eval/reward_mean``: mean of the weighted sums.

    ``eval/unscored_fraction``: rollouts that a reward could not score; the means are over the others.
    """
    return {
        "eval/unscored_fraction": float(1 - valid.mean()),
        "eval/accuracy": _mean(components[accuracy_of]),
        "eval/reward_mean": _mean(rewards[valid]),
        **{f"eval/{name}_mean": _mean(values) for name, values in components.items()},
    }


def average(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over optimizer steps of the metrics that each of them has."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _mean(np.array([step[name] for step in steps if name in step])) for name in names}


def _mean(values: FloatArray) -> float:
    """Mean of the values that are not NaN; 0 of none."""
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else 0.0
