"""A sampler for benchmarks of what is around it: a function makes its groups."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.engine.sampler.admissions import OneByOneSampler
from mmrl.engine_api import SamplingRequest
from mmrl.types import RolloutGroup


class MadeGroups(OneByOneSampler):
    """Implements ``engine_api.Sampler``."""

    def __init__(self, make: Callable[[SamplingRequest], RolloutGroup]) -> None:
        super().__init__()
        self._make = make

    def _group(self, request: SamplingRequest) -> RolloutGroup:
        return self._make(request)
