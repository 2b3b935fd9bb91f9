"""Limits, by precision, on the gap between two computations of the same log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mmrl.types import FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """Differences in nats from which a run warns or stops.

    Single bf16 log-probs of a sound model differ by several 1e-3 and rare ones by more, so their maximum says little;
    wrong weights, images or positions move the mean by 0.1 and more. In float32 sound log-probs differ by some 1e-6.
    Single tokens of a very sharp policy differ by 5e-4 between float32 and float64, likely ones too: see
    ``engine/README.md``.

    Attributes:
        mean_warn: Mean absolute difference to warn of.
        mean_stop: Mean absolute difference to stop at.
        p99_stop: 99th percentile of the absolute differences to stop at: a few percent of wrong rows.
        max_stop: Largest absolute difference to stop at.
    """

    mean_warn: float
    mean_stop: float
    p99_stop: float
    max_stop: float


LIMITS: Mapping[str, Limits] = MappingProxyType(
    {
        "float32": Limits(mean_warn=1e-5, mean_stop=1e-4, p99_stop=1e-4, max_stop=1e-3),
        "bfloat16": Limits(mean_warn=2e-2, mean_stop=6e-2, p99_stop=0.5, max_stop=float("inf")),
    }
)


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference ``d = other - one`` between two sets of token log-probs.

    Attributes:
        abs_mean: Mean of ``|d|``.
        abs_p99: 99th percentile of ``|d|``.
        abs_max: Largest ``|d|``.
        kl: Mean of ``exp(d) - 1 - d``, an estimate of KL(one || other) on tokens sampled from ``one``.
    """

    abs_mean: float
    abs_p99: float
    abs_max: float
    kl: float

    @classmethod
    def between(cls, one: Sequence[FloatArray], other: Sequence[FloatArray]) -> Gap:
        """Compare arrays token by token; no tokens at all is no gap."""
        difference = np.concatenate([np.zeros(0), *other], dtype=np.float64)
        difference -= np.concatenate([np.zeros(0), *one], dtype=np.float64)
        if not len(difference):
            return cls(0.0, 0.0, 0.0, 0.0)
        kl = np.minimum(difference, 20.0)
        np.expm1(kl, out=kl)
        kl -= difference
        size = np.abs(difference, out=difference)
        mean, largest = float(size.mean()), float(size.max())  # before the quantile moves the numbers
        return cls(mean, float(np.quantile(size, 0.99, overwrite_input=True)), largest, float(kl.mean()))

    def verdict(self, precision: str) -> str:
        """``ok``, ``warn`` or ``stop``; a gap that is not finite stops."""
        limits = LIMITS[precision]
        within = (
            self.abs_mean <= limits.mean_stop and self.abs_p99 <= limits.p99_stop and self.abs_max <= limits.max_stop
        )
        if not within:
            return "stop"
        return "warn" if self.abs_mean > limits.mean_warn else "ok"
