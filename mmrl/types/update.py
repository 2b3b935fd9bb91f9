"""The results of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mmrl.types.arrays import FloatArray
from mmrl.types.batch import PreUpdateStatistics


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The results of one optimizer step.

    Attributes:
        metrics: Reduced over all micro-batches and ranks.
        logprobs: Each row's, (T_i,) float32, before the step; of a network without log-probs empty arrays.
        entropies: Likewise the entropies, as ``PackedTokens.entropy_T``.
        fault: The reason why no rank took the step, such as a loss that is not finite; empty if all did.
        notice: Words for the user on how it was taken, such as with smaller micro-batches; empty if nothing.
        flops: Operations that the own rows' passes need, see ``ops.cost``; 0 if they are not counted.
        memory_bytes: Allocated on the device at most, above what was allocated before; None if that is not known.
        views: Each row's log-probs and entropies given its prompt's scored views, by name; none if nothing is scored.
        final_values: (B,) float32 scores of the rows before the step; None of a network without a score head.
        vpreds: Each row's, (T,) float32, a critic's values before the step; none of any other network.
    """

    metrics: Mapping[str, float]
    logprobs: Sequence[FloatArray]
    entropies: Sequence[FloatArray]
    fault: str = ""
    notice: str = ""
    flops: int = 0
    memory_bytes: int | None = None
    views: Sequence[Mapping[str, PreUpdateStatistics]] = ()
    final_values: FloatArray | None = None
    vpreds: Sequence[FloatArray] = ()

    @classmethod
    def of(cls, metrics: Mapping[str, float], statistics: Sequence[PreUpdateStatistics], **others: Any) -> Self:
        """The result with the statistics of each row."""
        views = [each.views for each in statistics] if any(each.views for each in statistics) else ()
        of_rows = [each.logprobs for each in statistics], [each.entropy for each in statistics]
        scores = [each.final_value for each in statistics if each.final_value is not None]
        final = np.array(scores, np.float32) if scores else None
        vpreds = [each.vpreds for each in statistics] if any(len(each.vpreds) for each in statistics) else ()
        return cls(metrics, *of_rows, **others, views=views, final_values=final, vpreds=vpreds)

    @property
    def statistics(self) -> list[PreUpdateStatistics]:
        """All of each row."""
        views = self.views or [{}] * len(self.logprobs)
        final = [None] * len(self.logprobs) if self.final_values is None else self.final_values.tolist()
        vpreds = self.vpreds or [np.zeros(0, np.float32)] * len(self.logprobs)
        return list(map(PreUpdateStatistics, self.logprobs, self.entropies, views, final, vpreds))
