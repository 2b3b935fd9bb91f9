"""The numbers of an evaluation, each with its interval: means, pass@k and majority@k, and the effect of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmrl.commands.eval.episodes import episode_estimates
from mmrl.ops.estimation import Estimate, majority_at_k, mean_estimate, pass_at_k, score_estimate
from mmrl.ops.metrics import right_of
from mmrl.types import Batch, BoolArray, FloatArray, ScoredGroup

Estimates = Mapping[str, Estimate]


def estimates(
    groups: Sequence[ScoredGroup], batch: Batch, values: Mapping[str, float], accuracy_of: str
) -> dict[str, Estimate]:
    """An evaluation's metrics, with intervals if they are means over completions, and these:

    - ``eval/<name>_pass@<k>``: see ``pass_at_k``, for each component that is no penalty, and for k = 1, 2, 4, ... and
      the number of completions. A completion is right if its value of the component is at least 1. The mean is over
      the prompts with at least k scored completions.
    - ``eval/<name>_majority@<k>``: likewise ``majority_at_k``, for each component whose reward reads answers.
    - ``eval/episode/*``: see ``episode_estimates``.

    Args:
        batch: The groups as one.
        values: The batch's metrics, as a run logs them. Accuracy is left out if its reward scores no row.
    """
    found = {name: Estimate(value) for name, value in values.items()}
    if np.isnan(batch.component(accuracy_of)).all():
        del found["eval/accuracy"]
    scores_by_metric = rewards_by_metric(batch, accuracy_of)
    scores_by_metric["eval/length/truncated_fraction"] = batch.truncated.astype(np.float64)
    for name in found.keys() & scores_by_metric.keys():
        rows = ~np.isnan(scores_by_metric[name])
        estimate = score_estimate(scores_by_metric[name][rows], batch.group_ids[rows])
        found[name] = replace(estimate, value=values[name])
    lengths = np.array([len(mask) for mask in batch.masks], np.float64)
    found["eval/length/completion_mean"] = mean_estimate(lengths, batch.group_ids)
    num_samples = max(len(group.group.rollouts) for group in groups)
    if num_samples > 1:
        for k in sample_sizes(num_samples):
            found |= dict(_at_k(groups, batch.penalties, k))
    return found | episode_estimates(groups)


def rewards_by_metric(batch: Batch, accuracy_of: str) -> dict[str, FloatArray]:
    """(B,) values whose means are accuracy, the rewards' sum and each component; NaN where one does not count."""
    components = {f"eval/{name}_mean": values for name, values in batch.components.items()}
    reward = np.where(batch.valid, batch.rewards, np.nan)
    return {"eval/accuracy": right_of(batch.component(accuracy_of)), "eval/reward_mean": reward, **components}


def differences(one: Batch, other: Batch, accuracy_of: str) -> dict[str, Estimate]:
    """Mean of ``one - other`` for the same members of the same groups, paired; clustered by prompt.

    A pair is left out unless both are scored.
    """
    pairs = [rewards_by_metric(batch, accuracy_of) for batch in (one, other)]
    found = {}
    for name, scores in pairs[0].items():
        if name not in pairs[1]:
            continue
        difference = scores - pairs[1][name]
        rows: BoolArray = ~np.isnan(difference)
        if rows.any():
            found[name] = mean_estimate(difference[rows], one.group_ids[rows])
    return found


def sample_sizes(num_samples: int) -> list[int]:
    """1, 2, 4, ... and ``num_samples``."""
    return [*(2**i for i in range((num_samples - 1).bit_length())), num_samples]


def _at_k(groups: Sequence[ScoredGroup], penalties: frozenset[str], k: int) -> Iterator[tuple[str, Estimate]]:
    for name in dict.fromkeys(name for group in groups for name in group.components):
        passes, majorities = list[float](), list[float]()
        for group in groups:
            scored = ~np.isnan(group.component(name))
            scores = group.component(name)[scored]
            if len(scores) < k:
                continue
            passes.append(pass_at_k(len(scores), int(right_of(scores).sum()), k))
            if (answers := group.answers.get(name)) is not None:
                majorities.append(majority_at_k([answers[i] for i in np.flatnonzero(scored)], scores, k))
        if passes and not penalties & {name, name.rpartition("/")[0]}:
            yield f"eval/{name}_pass@{k}", score_estimate(np.array(passes), np.arange(len(passes)))
        if majorities:
            yield f"eval/{name}_majority@{k}", score_estimate(np.array(majorities), np.arange(len(majorities)))
