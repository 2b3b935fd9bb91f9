"""The gap between two computations of samples' log-probs, on the tokens that the policy wrote."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.ops.parity import Gap
from mmrl.types import BoolArray, FloatArray, Sample


def gap_of(samples: Sequence[Sample], one: Sequence[FloatArray], other: Sequence[FloatArray]) -> Gap:
    """The gap on the tokens that the policy wrote, of samples that the learner has seen."""
    seen = [(s.mask, a, b) for s, a, b in zip(samples, one, other, strict=True) if len(b)]
    return Gap.between([_written(a, mask) for mask, a, _ in seen], [_written(b, mask) for mask, _, b in seen])


def sampled(samples: Sequence[Sample]) -> list[FloatArray]:
    """The log-probs that the sampler has told."""
    return [sample.sampler_logprobs for sample in samples]


def _written(values: FloatArray, mask: BoolArray) -> FloatArray:
    """The values of the tokens that the policy wrote; the array itself where it wrote all of them."""
    return values if mask.all() else values[mask]
