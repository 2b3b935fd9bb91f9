"""Numbers that describe a rollout batch, each by its formula; ``B`` rollouts, the means over valid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmrl.ops.credit import TOLERANCE, explained_variance, members_of, zero_signal_fraction
from mmrl.ops.parity import Gap
from mmrl.types import Batch, BoolArray, FinishReason, FloatArray, Rollout

ADAPTER_KEPT = "policy/adapter_kept"
"""The metric of what rounding leaves of the adapters; see ``engine.merged_linear.Kept``."""
_EPISODE_ENDS: tuple[FinishReason, ...] = ("environment", "turns", "length", "budget", "failed")


def reward_metrics(batch: Batch, accuracy_of: str) -> dict[str, float]:
    """``reward/*`` and ``group/*`` of the rollouts that a step sampled: rewards before any shaping by the algorithm.

    - ``reward/mean``, ``reward/std``: of the weighted sums over valid rollouts (std of the population).
    - ``reward/<name>_mean``: of each component's raw values, over the rows of the sources that it scores; left out
      where there are valid rollouts, and none of such a source. A part of a reward is ``reward/<label>/<name>_mean``.
    - ``reward/greedy_mean``: of the weighted sums over greedy rollouts, one per prompt with a valid rollout, where
      there are any.
    - ``reward/unscored_fraction``: rollouts that a reward could not score.
    - ``group/zero_signal_fraction``: groups whose valid rewards are all equal.
    - ``group/all_correct_fraction``, ``group/all_wrong_fraction``: groups whose valid completions are all right, or
      none of which is, by the component ``accuracy_of`` (see ``right_of``), of the groups that have any.

    See ``failure_metrics`` for ``reward/<name>_failed_fraction``.
    """
    valid = batch.rewards[batch.valid]
    right = right_of(batch.component(accuracy_of))
    groups = [right[members] for members in members_of(batch.group_ids, batch.valid & ~np.isnan(right))]
    return {
        "reward/mean": _mean(valid),
        "reward/std": float(valid.std()) if len(valid) else 0.0,
        **_component_means("reward", batch.components, batch.valid),
        "reward/unscored_fraction": float(1 - batch.valid.mean()),
        "group/zero_signal_fraction": zero_signal_fraction(batch.rewards, batch.group_ids, batch.valid),
        "group/all_correct_fraction": _mean(np.array([values.min() == 1 for values in groups])),
        "group/all_wrong_fraction": _mean(np.array([values.max() == 0 for values in groups])),
        **_greedy_metrics(batch),
    }


def view_metrics(batch: Batch, with_views: float | None) -> dict[str, float]:
    """``views/*`` of a step's rollouts; none if no prompt has views.

    - ``views/prompts_fraction``: groups whose prompts have images, and so have views.
    - ``views/<name>_reward_mean``, ``views/own_reward_mean``: of the weighted sums over valid rollouts that were
      sampled from the view, and from prompts themselves, where any was sampled from a view.

    Args:
        with_views: The share of groups whose prompts have views; None if none has.
    """
    found = {} if with_views is None else {"views/prompts_fraction": with_views}
    if batch.sampled_from is not None:
        names = np.array(batch.sampled_from)
        for name in dict.fromkeys(sorted(batch.sampled_from)):
            if len(rewards := batch.rewards[batch.valid & (names == name)]):
                found[f"views/{name or 'own'}_reward_mean"] = float(rewards.mean())
    return found


def _greedy_metrics(batch: Batch) -> dict[str, float]:
    if batch.greedy_components is None:
        return {}
    _, first = np.unique(batch.group_ids[batch.valid], return_index=True)
    scores = {name: values[batch.valid][first] for name, values in batch.greedy_components.items()}
    sums = [batch.weights[name] * np.nan_to_num(values) for name, values in scores.items()]  # NaN: of other sources
    return {"reward/greedy_mean": _mean(np.sum(sums, axis=0))}


def failure_metrics(section: str, failed: Mapping[str, float]) -> dict[str, float]:
    """``<section>/<name>_failed_fraction``: rollouts that the reward hung, crashed or raised on, of all sampled ones.

    They are left unscored; one that answers None has not failed. Greedy rollouts are sampled ones too.
    """
    return {f"{section}/{name}_failed_fraction": fraction for name, fraction in failed.items()}


def refill_metrics(kept: Sequence[bool], rounds: int) -> dict[str, float]:
    """``rollout/*``: the fate of the groups that a step sampled; groups carried over from an earlier step do not count.

    - ``rollout/sampled_groups``: groups sampled in this step, in all rounds.
    - ``rollout/kept_groups``: those of them that the algorithm keeps.
    - ``rollout/acceptance_rate``: kept over sampled.
    - ``rollout/rounds``: times that prompts were sampled: 1 and the rounds of replacements.
    """
    return {
        "rollout/sampled_groups": float(len(kept)),
        "rollout/kept_groups": float(sum(kept)),
        "rollout/acceptance_rate": sum(kept) / len(kept),
        "rollout/rounds": float(rounds),
    }


def episode_metrics(rollouts: Sequence[Rollout], failed_calls: float | None) -> dict[str, float]:
    """``episode/*`` of the episodes that were sampled, failed ones too; none without an environment.

    - ``episode/turns_mean``: turns of the policy, answered or not; mean over episodes.
    - ``episode/calls_mean``: tool calls that the policy wrote, also those that cannot be read; mean over episodes.
    - ``episode/invalid_calls_fraction``: calls that cannot be read, of all calls; 0 without any.
    - ``episode/observation_tokens_mean``: tokens between the policy's turns, marks of turns and image tokens included;
      mean over episodes. The first observation is a part of the prompt.
    - ``episode/finish_<reason>_fraction``: episodes that ended so, for each reason but ``stop``.
    - ``episode/failed_calls_fraction``: calls of the environment that failed, of all its calls; see ``CallTally``.
    - ``episode/shared_fraction``: tokens that episodes have from those that they go on from, of all tokens after
      prompts; only where some do.

    Args:
        failed_calls: The share of calls that failed; None leaves that metric out.
    """
    if not any(rollout.episode or rollout.failure for rollout in rollouts):
        return {}
    calls = [[call for played in rollout.episode for call in played.turn.calls] for rollout in rollouts]
    errors = [bool(call.error) for of_one in calls for call in of_one]
    ends = [rollout.finish_reason for rollout in rollouts]
    return {
        "episode/turns_mean": _mean(np.array([len(rollout.episode) for rollout in rollouts])),
        "episode/calls_mean": _mean(np.array([len(of_one) for of_one in calls])),
        "episode/invalid_calls_fraction": _mean(np.array(errors)),
        "episode/observation_tokens_mean": _mean(np.array([(~rollout.mask).sum() for rollout in rollouts])),
        **{f"episode/finish_{end}_fraction": ends.count(end) / len(ends) for end in _EPISODE_ENDS},
        **({} if failed_calls is None else {"episode/failed_calls_fraction": failed_calls}),
        **_shared(rollouts),
    }


def _shared(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if all(rollout.branch is None for rollout in rollouts):
        return {}
    shared, all_ = (sum(counts) for counts in ([r.num_shared for r in rollouts], [len(r.token_ids) for r in rollouts]))
    return {"episode/shared_fraction": shared / max(all_, 1)}


def length_metrics(masks: Sequence[BoolArray], truncated: BoolArray) -> dict[str, float]:
    """``length/completion_mean`` and ``_max`` (tokens that the policy wrote), and the share ended by a limit."""
    lengths = np.array([np.count_nonzero(mask) for mask in masks])
    return {
        "length/completion_mean": float(lengths.mean()),
        "length/completion_max": float(lengths.max()),
        "length/truncated_fraction": float(truncated.mean()),
    }


def advantage_metrics(masks: Sequence[BoolArray], advantages: Sequence[FloatArray]) -> dict[str, float]:
    """``advantage/*`` over the tokens in the loss (``masks``); 0 if there is none.

    - ``advantage/mean``, ``advantage/abs_mean``: means of ``A`` and ``|A|``.
    - ``advantage/max``: the largest ``A``.
    """
    values = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)])
    return {
        "advantage/mean": _mean(values),
        "advantage/abs_mean": _mean(np.abs(values)),
        "advantage/max": float(values.max()) if len(values) else 0.0,
    }


def critic_metrics(
    masks: Sequence[BoolArray], values: Sequence[FloatArray], returns: Sequence[FloatArray]
) -> dict[str, float]:
    """``critic/*`` before a step, over the tokens that the critic learns (``masks``); 0 if there is none.

    - ``critic/explained_variance``: see ``ops.credit.explained_variance``.
    - ``critic/value_mean``, ``critic/return_mean``: means of values and returns.
    """
    values_T, returns_T = (
        np.concatenate([np.zeros(0), *(x_T[mask] for x_T, mask in zip(each, masks, strict=True))])
        for each in (values, returns)
    )
    return {
        "critic/explained_variance": explained_variance(values_T, returns_T),
        "critic/value_mean": _mean(values_T),
        "critic/return_mean": _mean(returns_T),
    }


def mismatch_metrics(gap: Gap) -> dict[str, float]:
    """``mismatch/*``: learner minus sampler, over the tokens that the policy wrote; see ``Gap``."""
    return {
        "mismatch/logprob_abs_mean": gap.abs_mean,
        "mismatch/logprob_abs_max": gap.abs_max,
        "mismatch/kl": gap.kl,
        "mismatch/token_mult_prob_error": gap.ratio,
    }


def probe_metrics(gaps: Sequence[Gap]) -> dict[str, float]:
    """``mismatch/probe_abs_mean`` and ``_max``: of the same differences on the probe's tokens; of several ranks that
    sample, the largest."""
    return {
        "mismatch/probe_abs_mean": max(gap.abs_mean for gap in gaps),
        "mismatch/probe_abs_max": max(gap.abs_max for gap in gaps),
    }


def evaluation_metrics(
    rewards: FloatArray, valid: BoolArray, components: Mapping[str, FloatArray], accuracy_of: str
) -> dict[str, float]:
    """``eval/accuracy``: share of the rollouts that are right by the component ``accuracy_of`` (see ``right_of``).

    - ``eval/<name>_mean``: as ``reward/<name>_mean``; of a graded component it tells more than the share.
    - ``eval/reward_mean``: mean of the weighted sums.
    - ``eval/unscored_fraction``: rollouts that a reward could not score; shares and means are over the others.
    """
    return {
        "eval/unscored_fraction": float(1 - valid.mean()),
        "eval/accuracy": _mean(right_of(components.get(accuracy_of, np.zeros(0)))),
        "eval/reward_mean": _mean(rewards[valid]),
        **_component_means("eval", components, np.ones_like(valid)),
    }


def right_of(values: FloatArray) -> FloatArray:
    """1 where a value of the component that tells right from wrong is at least 1 (within 1e-8), else 0; NaN stays."""
    return np.where(np.isnan(values), np.nan, values >= 1 - TOLERANCE)


def average(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over optimizer steps of the metrics that each of them has."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _mean(np.array([step[name] for step in steps if name in step])) for name in names}


def _component_means(section: str, components: Mapping[str, FloatArray], rows: BoolArray) -> dict[str, float]:
    """Means of the components that score any row, or of all components if none does: a mean of nothing would look like
    a score of 0."""
    scored = {name: values[rows] for name, values in components.items()}
    nothing = all(np.isnan(values).all() for values in scored.values())
    return {f"{section}/{name}_mean": _mean(v) for name, v in scored.items() if nothing or not np.isnan(v).all()}


def _mean(values: FloatArray) -> float:
    """Mean of the values that are not NaN; 0 if there is none."""
    values = np.asarray(values, np.float64)
    missing = np.isnan(values)
    values = values[~missing] if missing.any() else values
    return float(values.mean()) if len(values) else 0.0
