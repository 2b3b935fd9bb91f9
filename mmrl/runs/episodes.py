"""The player of a run's episodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.runs.setup import RunSetup


@contextmanager
def playing(setup: RunSetup) -> Iterator[EpisodePlayer | None]:
    """The player of a run's episodes, whose workers live as long; None if there is no environment or no sampling."""
    spec, facts = setup.config.environment, setup.environment
    if spec is None or facts is None or not setup.with_sampler:
        yield None
        return
    with EnvironmentPool(spec) as pool:
        most = setup.config.sampler.max_new_tokens
        yield EpisodePlayer(spec, most, facts.components, pool, setup.encoder, setup.media)
