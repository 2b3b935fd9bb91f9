"""A notice that young adapters change little of what is computed, as their run's type rounds most of it away."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmrl.ops.metrics import ADAPTER_KEPT

LOW = 0.5
"""Share of the adapters' change below which a run is told."""


class AdapterNotice:
    """Tells once where little of the adapters' change is left after rounding.

    Args:
        event: Called with a kind and fields.
    """

    def __init__(self, precision: str, event: Callable[..., None]) -> None:
        self._precision, self._event = precision, event
        self._is_told = False

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step."""
        kept = metrics.get(ADAPTER_KEPT)
        if self._is_told or kept is None or kept >= LOW:
            return
        self._is_told = True
        message = (
            f"step {step}: {kept:.0%} of the adapters' change is left after rounding to {self._precision} "
            f"({ADAPTER_KEPT}); sampler and learner compute with the same rounded weights, so the rest is late and "
            "not lost: it arrives as the adapters grow; raise learner.lr if the share stays low"
        )
        self._event("adapters", message=message, step=step, kept=kept)
