"""Values that come back from packed rows, and sums of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mmrl.engine.network.weights import of_all_ranks
from mmrl.ops.objective import PartialLoss
from mmrl.types import FloatArray, Sample, TrainingRow


def of_all(
    partials: Sequence[PartialLoss], strange: set[str], costs: Sequence[int]
) -> tuple[list[PartialLoss], set[str], list[Sequence[int]]]:
    """Partial sums of all ranks without their losses, the prompts that the ranks have named, and the costs of each
    rank's micro-batches."""
    sums: list[tuple[Mapping[str, float], int]] = [(partial.sums, partial.tokens) for partial in partials]
    ranks = of_all_ranks((sums, strange, costs))
    found = [PartialLoss(torch.zeros(()), sums, tokens) for own, *_ in ranks for sums, tokens in own]
    return found, {name for _, names, _ in ranks for name in names}, [costs for *_, costs in ranks]


def values_of(values_T: torch.Tensor, parts: Sequence[TrainingRow] | Sequence[Sample]) -> list[FloatArray]:
    """A packed row's values as one array per sample; values of an idle sample at the end are dropped."""
    lengths = [len(part.mask) for part in parts]
    return list(np.split(values_T.float().cpu().numpy(), np.cumsum(lengths)))[: len(parts)]
