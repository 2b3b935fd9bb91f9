"""Stands in for a critic: its network answers with the values that a run recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mmrl.engine_api import Network, UpdateResult, Way
from mmrl.interfaces import Algorithm
from mmrl.ops.objective import PartialLoss, value_loss, weighed_loss
from mmrl.types import CreditedGroup, FloatArray, PreUpdateStatistics, Sample, SampleKey, TrainingRow

Noted = Callable[[PartialLoss], dict[str, float]]
"""Makes metrics of an optimizer step's loss, and notes their names."""


class RecordedCritic(Network):
    """Implements ``engine_api.Network`` with a critic's values before a step, and before each optimizer step.

    Values of rows that the critic has not learned from are NaN.

    Args:
        algorithm: Gives the loss.
        groups: They hold all requested rollouts.
    """

    def __init__(self, algorithm: Algorithm, groups: Sequence[CreditedGroup], noted: Noted) -> None:
        self._algorithm, self._noted = algorithm, noted
        self._recorded = {
            rollout.key: (group, index) for group in groups for index, rollout in enumerate(group.scored.rollouts)
        }
        self._asked = Counter[SampleKey]()

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        places = [self._recorded[sample.key] for sample in samples]
        return [group.values[index] for group, index in places]

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        places = [self._recorded[sample.key] for sample in samples]
        known = [group.final_values[index] if len(group.final_values) else np.nan for group, index in places]
        return np.array(known, np.float32)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """Metrics of an optimizer step on the recorded values; no step is taken."""
        import torch

        began = [self._began(row) for row in rows]
        if any(len(each.vpreds) < len(row.mask) for each, row in zip(began, rows, strict=True)):
            return UpdateResult.of({}, began, fault="it was skipped in the run")
        if not rows:
            return UpdateResult({}, [], [])
        values_T = torch.from_numpy(np.concatenate([each.vpreds for each in began]))
        return UpdateResult.of(self._noted(weighed_loss(rows, *value_loss(self._algorithm, rows, values_T))), began)

    def _began(self, row: TrainingRow) -> PreUpdateStatistics:
        """The statistics before the next optimizer step that takes the row in."""
        key, nothing = row.sample.key, np.zeros(0, np.float32)
        group, index = self._recorded[key]
        updates = group.critic_updates[index] if group.critic_updates else ()
        number = self._asked[key]
        self._asked[key] += 1
        if number < len(updates):
            return updates[number]
        return PreUpdateStatistics(nothing, nothing, vpreds=np.full(len(row.mask), np.nan, np.float32))
