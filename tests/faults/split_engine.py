"""The fake engine with a sampler of its own: the learner publishes tables, and the sampler takes them by version."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch

from mmrl.config.sections import Config
from mmrl.engine.sampler.admissions import OneByOneSampler
from mmrl.engine_api import SamplingRequest, UpdateResult
from mmrl.errors import SamplersRestarted
from mmrl.interfaces import Algorithm
from mmrl.system import failpoints
from mmrl.types import RolloutGroup
from tests.faults.fake_engine import FakeEngine
from tests.faults.letter_steps import LetterSteps

SLEEPS = "FAKE_SLEEPS_S"
"""The environment variable with the longest sleep of a call in seconds; each call sleeps another time, in each run."""


def doze() -> None:
    """Sleep as long as nobody knows."""
    if longest := float(os.environ.get(SLEEPS, "0")):
        time.sleep(SystemRandom().uniform(0.0, longest))


def lose() -> None:
    """Lose the ranks that sample, which are there again at once."""
    raise SamplersRestarted("rank 0 of those that sample was lost, and is there again")


class TableSampler(OneByOneSampler):
    """Samples from a table that was published; a failpoint ``fake.sample`` may lose it by ``lose``."""

    def __init__(self, config: Config, logits_PV: torch.Tensor, version: int) -> None:
        super().__init__()
        self._config, self.logits_PV, self.updates = config, logits_PV, version

    def _group(self, request: SamplingRequest) -> RolloutGroup:
        failpoints.reach("fake.sample")
        doze()
        return FakeEngine._group(self, request)  # type: ignore[arg-type]

    _rollout = FakeEngine._rollout


class InParts(LetterSteps, TableSampler):
    """Writes a letter a step."""


class SplitFakeEngine(FakeEngine):
    """Keeps a published table until the sampler takes a later one, and refuses what no engine could do.

    Attributes:
        kept: The published tables by version.
        taken: The version of each ``sampling``.
        most_kept: Tables that were kept at once at most.
    """

    samples_apart = True

    def __init__(self, config: Config, algorithm: Algorithm | None, checkpoint: Path | None) -> None:
        super().__init__(config, algorithm, checkpoint)
        self.kept: dict[int, torch.Tensor] = {}
        self.taken: list[int] = []
        self.most_kept = 0
        self._samples, self._learns = threading.Lock(), threading.Lock()

    def publish(self) -> int:
        failpoints.reach("fake.publish")
        doze()
        self.kept[self.updates] = self.logits_PV.detach().clone()
        self.most_kept = max(self.most_kept, len(self.kept))
        return self.updates

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Any]:
        assert self._samples.acquire(blocking=False), "one sampler, and two that sample"
        try:
            version = self.publish() if version is None else version
            assert version >= max(self.taken, default=-1), "a sampler never goes back"
            self.taken.append(version)
            kind = TableSampler if self._config.sampler.partial is None else InParts
            sampler = kind(self._config, self.kept[version], version)
            for older in [each for each in self.kept if each < version]:
                del self.kept[older]
            try:
                yield sampler
            finally:
                sampler.leave()
        finally:
            self._samples.release()

    @contextmanager
    def learning(self) -> Iterator[FakeEngine]:
        assert self._learns.acquire(blocking=False), "one learner, and two that learn"
        try:
            yield self
        finally:
            self._learns.release()

    def update(self, rows: Any) -> UpdateResult:
        doze()
        return super().update(rows)
