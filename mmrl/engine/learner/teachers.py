"""Several teachers as one network: each row is scored by those of its source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmrl.config.reference import Teacher
from mmrl.engine.learner.network import Network
from mmrl.engine_api import Network as AnyNetwork
from mmrl.engine_api import UpdateResult, Way
from mmrl.types import FloatArray, Sample, TrainingRow


class Teachers(AnyNetwork):
    """Implements ``engine_api.Network`` on one rank; all ranks call it together.

    Args:
        teachers: As the config names them.
        networks: Theirs.
    """

    def __init__(self, teachers: Sequence[Teacher], networks: Sequence[Network]) -> None:
        self._teachers, self.networks = tuple(teachers), tuple(networks)

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        """The weighted means of the log-probs of each row's teachers; a row has one teacher at least.

        Every teacher is asked in turn, also where this rank has no rows for it: another may have some.
        """
        if way == "wide":
            return []
        found = [np.zeros(len(sample.token_ids)) for sample in samples]
        total = np.zeros(len(samples))
        for teacher, network in zip(self._teachers, self.networks, strict=True):
            own = [place for place, sample in enumerate(samples) if teacher.teaches(sample.prompt.prompt.source)]
            scored = network.score([samples[place] for place in own], way=way)
            for place, values in zip(own, scored, strict=True):
                found[place] += teacher.weight * values.astype(np.float64)
                total[place] += teacher.weight
        return [(values / weight).astype(np.float32) for values, weight in zip(found, total, strict=True)]

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        raise AssertionError("teachers are frozen")
