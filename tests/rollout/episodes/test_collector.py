"""Episodes through the collector: scores, batches and metrics, each number by hand."""

import json
from contextlib import nullcontext

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.interfaces import Algorithm, Needs
from mmrl.ops import metrics
from mmrl.rollout.batch import batch_of
from mmrl.rollout.collector import Collector, Decoding, sampled_metrics
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.system.clock import Clock
from mmrl.types import ENVIRONMENT, Message, Prompt
from tests.rollout.episodes.fakes import LetterEncoder, ScriptedSampler, media, without_clock

REWARD = '''
def ends(rollouts):
    assert not any(rollout.failure for rollout in rollouts)
    return [float(rollout.text == "end") for rollout in rollouts]
'''


@pytest.fixture(scope="module")
def pool(game):
    with EnvironmentPool(game(workers=2)) as found:
        yield found


class Greedy(Algorithm):
    """Wants a greedy episode beside each group."""

    source = "rollouts"

    def needs(self):
        return Needs(greedy_rollout=True)

    def credit(self, batch):
        raise AssertionError

    def loss(self, tokens):
        raise AssertionError


class Collecting:
    """A collector of real environments and rewards on a scripted sampler.

    Attributes:
        scripts: Turns of each episode, by prompt, namespace and member.
    """

    def __init__(self, pool, folder, scripts, *, rewards=True, group_size=2, **environment):
        (folder / "rewards.py").write_text(REWARD)
        self.config = from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train": {"name": "rows"}, "eval": {"name": "rows"}},
                "rewards": [{"name": f"{folder}/rewards.py:ends", "weight": 2.0}] if rewards else [],
                "algorithm": {"name": "any"},
                "environment": {"name": "game", **environment},
                "sampler": {"group_size": group_size, "max_new_tokens": 100},
                "trainer": {"steps": 1, "prompts_per_step": 2},
            }
        )
        self.scripts, self.begun = scripts, {}
        self.sampler = ScriptedSampler(self._script)
        encoder = LetterEncoder(store := media(folder))
        player = EpisodePlayer(self.config.environment, 100, ("length",), pool, encoder, store)
        self.scorer, self.events = Scorer(self.config.rewards, workers=1), []
        self.collector = Collector(
            self.config,
            self,
            self.scorer,
            lambda *news: None,
            event=lambda kind, **fields: self.events.append((kind, fields)),
            player=player,
        )
        self.prompts = [encoder.encode(Prompt(name, (Message("user", "go"),))) for name in ("p0", "p1")]

    def _script(self, request):
        """First requests come in the order of groups and members."""
        turn = len(request.segments) // 2
        if turn == 0:
            self.begun[id(request.segments) and len(self.begun)] = None
            self._latest = len(self.begun) - 1
            self._by_start = getattr(self, "_by_start", {})
        return self._turns(request)[turn]

    def sampling(self):
        return nullcontext(self.sampler)
