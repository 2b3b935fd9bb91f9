"""The gap between two computations of samples' log-probs, on the tokens that the policy wrote."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.ops.parity import Gap
from mmrl.types import BoolArray, FloatArray, Rollout, Sample


def gap_of(samples: Sequence[Sample], one: Sequence[FloatArray], other: Sequence[FloatArray]) -> Gap:
    """The gap on the tokens that the policy wrote, of samples that the learner has seen."""
    return _gap([sample.mask for sample in samples], one, other)


def gap_of_version(
    rollouts: Sequence[Rollout], version: int | None, one: Sequence[FloatArray], other: Sequence[FloatArray]
) -> Gap | None:
    """The gap on those tokens alone that weights of a version have sampled; None if there are none.

    Args:
        version: None is that of all of them.
    """
    if version is None:
        return gap_of(rollouts, one, other)
    masks = [rollout.mask & (rollout.version_of_token == version) for rollout in rollouts]
    seen = any(mask.any() and len(values) for mask, values in zip(masks, other, strict=True))
    return _gap(masks, one, other) if seen else None


def _gap(masks: Sequence[BoolArray], one: Sequence[FloatArray], other: Sequence[FloatArray]) -> Gap:
    seen = [(mask, a, b) for mask, a, b in zip(masks, one, other, strict=True) if len(b)]
    return Gap.between([_written(a, mask) for mask, a, _ in seen], [_written(b, mask) for mask, _, b in seen])


def sampled(samples: Sequence[Sample]) -> list[FloatArray]:
    """The log-probs that the sampler has told."""
    return [sample.sampler_logprobs for sample in samples]


def _written(values: FloatArray, mask: BoolArray) -> FloatArray:
    """The values of the tokens that the policy wrote; the array itself where it wrote all of them."""
    return values if mask.all() else values[mask]
