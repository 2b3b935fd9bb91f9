"""A reward model with an optimizer: its updates take scores where a policy's take log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mmrl.engine.learner.trained_network import TrainedNetwork
from mmrl.engine_api import Way
from mmrl.ops.objective import PartialLoss, score_loss, weighed_loss
from mmrl.types import FloatArray, PreUpdateStatistics, Sample, TrainingRow


class TrainedRewardModel(TrainedNetwork):
    """A reward model that is trained alone; nothing samples from it."""

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        raise AssertionError("a reward model has no log-probs")

    def _num_values(self, samples: Sequence[Sample]) -> int:
        return len(samples)

    def _partial(self, rows: Sequence[TrainingRow], found: Sequence[torch.Tensor]) -> PartialLoss:
        (final_values_N,) = found
        return weighed_loss(rows, *score_loss(self._algorithm, rows, final_values_N))

    def _statistics(self, rows: Sequence[TrainingRow], packed: Sequence[torch.Tensor]) -> list[PreUpdateStatistics]:
        nothing, (final_values_N,) = np.zeros(0, np.float32), packed
        scores = final_values_N.cpu().tolist()
        return [PreUpdateStatistics(nothing, nothing, final_value=score) for score in scores[: len(rows)]]
