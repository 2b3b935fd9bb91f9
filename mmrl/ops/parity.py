"""Limits, by precision, on the gap between two computations of the same log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from mmrl.types import FloatArray

WIDER = MappingProxyType({"float32": "float64", "bfloat16": "float32"})
"""The type in which the rounding of a run's type shows."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference ``d = other - one`` between two sets of token log-probs.

    Attributes:
        abs_mean: Mean of ``|d|``.
        abs_p99: 99th percentile of ``|d|``.
        abs_max: Largest ``|d|``.
        kl: Mean of ``exp(d) - 1 - d``, an estimate of KL(one || other) on tokens sampled from ``one``.
        ratio: Mean of ``exp(|d|)``: by which factor probabilities differ.
    """

    abs_mean: float
    abs_p99: float
    abs_max: float
    kl: float
    ratio: float = 1.0

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
        ratio = float(np.exp(np.minimum(size, 20.0)).mean())
        p99 = float(np.quantile(size, 0.99, overwrite_input=True))
        return cls(mean, p99, largest, float(kl.mean()), ratio)

    def verdict(self, limits: Limits) -> str:
        """``ok``, ``warn`` or ``stop``; a gap that is not finite stops."""
        within = (
            self.abs_mean <= limits.mean_stop and self.abs_p99 <= limits.p99_stop and self.abs_max <= limits.max_stop
        )
        if not within:
            return "stop"
        return "warn" if self.abs_mean > limits.mean_warn else "ok"


@dataclass(frozen=True, slots=True)
class Limits:
    """Differences in nats from which a run warns or stops.

    Two sound computations differ by the rounding of their type, which grows with a network's depth and width and with
    the size of its logits. The limits here suit small networks. ``widened`` gives those of a network whose rounding
    was measured.

    Attributes:
        mean_warn: Mean absolute difference to warn of.
        mean_stop: Mean absolute difference to stop at.
        p99_stop: 99th percentile of the absolute differences to stop at: a few percent of wrong rows.
        max_stop: Largest absolute difference to stop at.
        warn_factor: Largest sound gap as a multiple of the noise, to warn above.
        stop_factor: The multiple of the noise to stop above.
        noise_stop: Mean noise that no sound network has; the learner itself is then wrong.
    """

    mean_warn: float
    mean_stop: float
    p99_stop: float
    max_stop: float
    warn_factor: float
    stop_factor: float
    noise_stop: float

    def widened(self, noise: Gap) -> Limits:
        """The limits of a network of this noise; none is smaller than before.

        Args:
            noise: Between the learner's log-probs and those of a wider type.
        """
        return replace(
            self,
            mean_warn=max(self.mean_warn, self.warn_factor * noise.abs_mean),
            mean_stop=max(self.mean_stop, self.stop_factor * noise.abs_mean),
            p99_stop=max(self.p99_stop, self.stop_factor * noise.abs_p99),
            max_stop=max(self.max_stop, self.stop_factor * noise.abs_max),
        )

    def told(self, unit: str = "nats") -> str:
        """The limits to stop at, in words."""
        bounds = f"a mean of {self.mean_stop:.1e} {unit}, a 99th percentile of {self.p99_stop:.1e}"
        return bounds if math.isinf(self.max_stop) else f"{bounds}, {self.max_stop:.1e} at most"


LIMITS: Mapping[str, Limits] = MappingProxyType(
    {
        "float32": Limits(1e-5, 1e-4, 1e-4, 1e-3, warn_factor=10, stop_factor=30, noise_stop=1e-4),
        "bfloat16": Limits(2e-2, 6e-2, 0.5, math.inf, warn_factor=2, stop_factor=3, noise_stop=0.2),
    }
)
