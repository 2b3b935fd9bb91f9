"""Episodes that branch, on many ranks: the same whatever the environment's calls take, and on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Branches
from mmrl.ops.branching import generator, places
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.system.clock import Clock
from mmrl.types import Branch, Message, Prompt, Rollout, Turn
from tests.rollout.episodes.fakes import LetterEncoder, media

FIRST = ReceivedObservation()


class Session:
    """Ends with the third turn; each answer takes up to ``longest_s``."""

    def __init__(self, pool: SlowPool, answered: Sequence[tuple[Turn | None, str]]) -> None:
        self.pool, self.answered, self.opened = pool, list(answered), pool.later(FIRST)

    def step(self, turn: Turn) -> Future[Any]:
        found = ReceivedObservation((f"seen {turn.index}",), reward=float(len(turn.text)), done=turn.index == 2)
        self.answered.append((turn, found.hash))
        return self.pool.later(found)

    def score(self) -> Future[Any]:
        return self.pool.later({})

    def close(self) -> None:
        """It holds nothing."""


class SlowPool:
    """As much of ``EnvironmentPool`` as a player needs, without a process."""

    seconds = 0.0

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._rng = longest_s, np.random.default_rng()

    def open(self, prompt: Prompt, seed: int) -> Session:
        return Session(self, [(None, FIRST.hash)])

    def branch(self, prompt: Prompt, seed: int, answered: Sequence[tuple[Turn | None, str]]) -> Session:
        return Session(self, answered)

    def take_close_failures(self) -> list[Any]:
        return []

    def later(self, answer: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._longest_s:
            threading.Timer(self._rng.uniform(0, self._longest_s), future.set_result, [answer]).start()
        else:
            future.set_result(answer)
        return future


def chosen(group: Sequence[Rollout], number: int) -> list[Branch]:
    found = places(group)
    return [found[place] for place in generator(group).integers(0, len(found), number)]


@pytest.mark.full
def test_branches_do_not_depend_on_ranks_nor_on_time(group_of: Any, tmp_path: Path) -> None:
    def play(ranks: int, size: int, longest_s: float) -> tuple[list[Any], list[Any]]:
        group, workers = group_of(ranks, size)
        spec = EnvironmentSpec.model_validate({"name": "game", "max_turns": 4, "latency_steps": 3})
        encoder: Any = LetterEncoder(media(tmp_path))
        pool: Any = SlowPool(longest_s)
        player = EpisodePlayer(spec, 60, (), pool, encoder, encoder.store)
        rows = [Prompt(f"p{i}", (Message("user", "go"),)) for i in range(5)]
        requests = [SamplingRequest(encoder.encode(row), 6, 1.0, 60, 100 * i) for i, row in enumerate(rows)]
        algorithm: Any = SimpleNamespace(branch=chosen)
        event = lambda kind, **fields: None  # noqa: E731
        with ExitStack() as stack:
            sampler = stack.enter_context(group.sampling())
            branching = Branching(algorithm, Branches(2, 2), len(rows))
            found = player.play(sampler, requests, range(5), player.tally(), Clock(), event, branching)
            rollouts = [rollout for _, each in sorted(found, key=lambda pair: pair[0]) for rollout in each.rollouts]
        told = [(r.key, r.branch, r.token_ids.tolist(), r.components, r.finish_reason) for r in rollouts]
        steps = [[(played.began, played.finished) for played in rollout.episode] for rollout in rollouts]
        return told, [steps, *(worker.began for worker in workers.samplers)]

    alone, _ = play(1, 1, 0.0)
    assert sum(branch is not None and branch.turn > 0 for _, branch, *_ in alone) >= 8 and len(alone) == 30
    for ranks, size in ((3, 1), (4, 2)):
        one, other = (play(ranks, size, longest_s) for longest_s in (0.0, 0.01))
        assert one == other
        assert one[0] == alone
