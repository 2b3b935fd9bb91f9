"""``replay``: an algorithm on recorded numbers, through a run's own code but without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrl import registry
from mmrl.errors import plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.types import Batch, BoolArray, Credit, EncodedPrompt, FloatArray, IntArray, Sample, Segment


@dataclass(frozen=True, slots=True)
class Replay:
    """What an algorithm made of a batch.

    Attributes:
        advantages: (B,) or (B, T), as the algorithm gives them; 0 outside the mask.
        loss: The optimizer step's loss.
        grad_log_probs: (B, T) gradient of the loss with respect to the current log-probs.
        sequence_weights: (B,) weights; 0 for rows that are invalid, fully masked or not kept.
        metrics: Of ``credit`` and ``loss``, reduced over the batch.
    """

    advantages: FloatArray
    loss: float
    grad_log_probs: FloatArray
    sequence_weights: FloatArray
    metrics: Mapping[str, float]


def replay(
    algorithm: str | type[Algorithm] | Algorithm,
    batch: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    ranks: int = 1,
    microbatches: int = 1,
    dtype: str = "float64",
) -> Replay:
    """Run an algorithm on one batch through the real packing, weighting and loss code.

    ``select`` is not called; groups may be split to fill the micro-batches. Garbage in masked places, and in the
    rewards of invalid rows, changes nothing. ``observe`` is called with the metrics, as after a step.

    Args:
        algorithm: A registered name, a class, or an algorithm.
        batch: Response-only arrays, right-padded: ``group_ids`` (B,), ``rewards`` (B,), ``response_mask``,
            ``log_probs`` and ``rollout_log_probs`` (B, T). Optional: ``reward_valid``, ``greedy_rewards`` and
            ``truncated`` (B,), ``old_log_probs`` and ``ref_log_probs`` (B, T; without them as in a run that does not
            compute them), ``entropy`` (B, T; zeros without it), ``max_len``, the default of the length constant.
        options: The algorithm's options, if it is given by name or class.
        ranks: Simulated ranks.
        microbatches: Micro-batches of each rank.
        dtype: Precision of the loss: ``float64`` or ``float32``.

    Raises:
        ConfigError: The options do not fit.
        PluginError: No such algorithm, or one of its hooks raised or answered what it may not.
    """
    import torch

    from mmrl.ops.objective import (
        advantages_per_token,
        assign_credit,
        loss_masks,
        partial_loss,
        reduce_partials,
        training_rows,
    )

    algorithm = registry.given("algorithm", algorithm, options)
    arrays = RecordedBatch(batch, dtype)
    if algorithm.source == "demonstrations":  # as the trainer does
        credit = Credit(np.ones(len(arrays.samples)))
    else:
        credit = assign_credit(algorithm, arrays.batch)
    masks = loss_masks(arrays.batch, credit)
    advantages = advantages_per_token(credit, masks)
    rows = training_rows(
        arrays.samples,
        masks,
        advantages,
        arrays.batch.group_ids,
        algorithm.aggregation.with_default(batch.get("max_len")),
        range(len(masks)),
        old_logprobs=arrays.batch.old_logprobs,
        reference_logprobs=arrays.batch.reference_logprobs,
        constants=credit.constants,
    )
    leaf = torch.tensor(arrays.logprobs, dtype=getattr(torch, dtype), requires_grad=True)
    partials = []
    for part in _split(list(rows), ranks * microbatches):
        logprobs, entropy = torch.cat([leaf[i] for i in part]), torch.cat([arrays.entropy[i] for i in part])
        partial = partial_loss(algorithm, [rows[i] for i in part], logprobs, entropy)
        with plugin_errors(algorithm, "loss"):
            partial.loss.backward()
        partials.append(partial)
    weights = np.zeros(len(arrays.samples))
    for i, row in rows.items():
        weights[i] = row.weight
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    per_row = np.ndim(credit.values[0]) == 0
    metrics = {**credit.metrics, **reduce_partials(partials)}
    with plugin_errors(algorithm, "observe"):
        observed = algorithm.observe(metrics)
    return Replay(
        advantages=np.asarray(credit.values, np.float64) if per_row else np.stack(advantages),
        loss=float(sum(float(partial.loss.detach()) for partial in partials)),
        grad_log_probs=gradient.numpy(),
        sequence_weights=weights,
        metrics={**metrics, **observed},
    )


class RecordedBatch:
    """A padded batch as the records that a run would hold, padding and all: what is masked must not matter.

    It holds copies, which an algorithm may spoil.
    """

    def __init__(self, batch: Mapping[str, Any], dtype: str) -> None:
        import torch

        masks = [np.array(mask, bool) for mask in batch["response_mask"]]
        self.logprobs = np.asarray(batch["log_probs"], np.float64)
        sampler = _rows(batch["rollout_log_probs"])
        self.samples = [_sample(mask, logprobs) for mask, logprobs in zip(masks, sampler, strict=True)]
        rewards = np.array(batch["rewards"], np.float64)
        valid = np.array(batch.get("reward_valid", np.ones(len(rewards))), bool)
        entropy = torch.tensor(batch.get("entropy", np.zeros_like(self.logprobs)), dtype=getattr(torch, dtype))
        self.entropy = list(entropy)
        greedy = batch.get("greedy_rewards")
        self.batch = Batch(
            rewards=rewards,
            valid=valid,
            group_ids=np.array(batch["group_ids"], np.int64),
            masks=masks,
            truncated=np.array(batch.get("truncated", np.zeros(len(rewards))), bool),
            components={"reward": rewards.copy()},
            old_logprobs=_rows(batch["old_log_probs"]) if "old_log_probs" in batch else None,
            reference_logprobs=_rows(batch["ref_log_probs"]) if "ref_log_probs" in batch else None,
            sampler_logprobs=sampler,
            weights={"reward": 1.0},
            greedy_components=None if greedy is None else {"reward": np.array(greedy, np.float64)},
        )


def _rows(values: npt.ArrayLike) -> list[FloatArray]:
    return list(np.array(values, np.float64))


def _sample(mask: BoolArray, sampler_logprobs: FloatArray) -> Sample:
    """A completion whose segments alternate where the mask does."""
    segments, start = [], 0
    for by_policy, run in groupby(mask.tolist()):
        end = start + len(list(run))
        ids: IntArray = np.zeros(end - start, np.int32)
        segments.append(Segment(ids, by_policy, sampler_logprobs[start:end]))
        start = end
    prompt = EncodedPrompt("", (), None, {}, None, "", np.zeros(1, np.int32), ())
    return Sample(prompt, tuple(segments))


def _split(indices: Sequence[int], parts: int) -> list[Sequence[int]]:
    return [part for part in (indices[i::parts] for i in range(parts)) if part]
