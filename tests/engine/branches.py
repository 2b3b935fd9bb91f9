"""Episodes that branch after pictures, played on a real sampler with a real environment and encoder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.engine_api import Sampler, SamplingRequest
from mmrl.interfaces import Branches
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.system.clock import Clock
from mmrl.types import Branch, EncodedPrompt, RolloutGroup
from tests.engine.episodes import TEMPERATURE, whole_logprobs

PICTURES = """
import numpy as np

from mmrl import Environment, Observation

class Pictures(Environment):
    def reset(self, prompt, seed):
        self.random = np.random.default_rng(seed)

    def step(self, turn):
        picture = self.random.integers(0, 256, (60 + 20 * turn.index, 90, 3), np.uint8)
        return Observation([f"That was {len(turn.text)}. ", picture, " So?"], role="user", reward=len(turn.text))
"""


def play_branches(sampler: Sampler, prompt: EncodedPrompt, bench: Any, folder: Path) -> RolloutGroup:
    """Four episodes of three turns: one leaves the first before its second turn, one the second before its last."""
    (folder / "pictures.py").write_text(PICTURES)
    name = f"{folder / 'pictures.py'}:Pictures"
    limits = {"max_turns": 3, "max_turn_tokens": 6, "max_observation_tokens": 200, "max_images": 8, "workers": 1}
    spec = EnvironmentSpec.model_validate({"name": name, **limits})
    chooser: Any = SimpleNamespace(branch=lambda group, number: [Branch(0, 1), Branch(1, 2)])
    request = SamplingRequest(prompt, 4, TEMPERATURE, 64, seed=11)
    with EnvironmentPool(spec) as pool:
        player = EpisodePlayer(spec, 64, (), pool, bench.encoder, bench.media)
        event = lambda kind, **fields: None  # noqa: E731
        branching = Branching(chooser, Branches(1, 2), 1)
        ((_, group),) = player.play(sampler, [request], [3], player.tally(), Clock(), event, branching)
    return group


def assert_branches(group: RolloutGroup, reference: Any, media: Any) -> None:
    """Branches share their parent's tokens to the bit, and all log-probs equal plain transformers' to 1e-4."""
    first, second, third, fourth = group.rollouts
    for child, parent, turn in ((third, first, 1), (fourth, second, 2)):
        assert child.branch is not None and not child.failure and child.finish_reason == "turns"
        shared = child.num_shared
        assert child.segments[: 2 * turn] == parent.segments[: 2 * turn] and shared > 0
        assert child.token_ids[:shared].tolist() == parent.token_ids[:shared].tolist()
        assert np.array_equal(child.sampler_logprobs[:shared], parent.sampler_logprobs[:shared])
        assert child.token_ids[shared:].tolist() != parent.token_ids[shared:].tolist()
        before = [image.hash for segment in parent.segments[: 2 * turn] for image in segment.images]
        images, own = [image.hash for image in child.all_images], len(group.prompt.images)
        assert images[own : own + turn] == before and len(images) == len({*images}) == own + 2
        assert child.episode[:turn] == parent.episode[:turn]
    for rollout in group.rollouts:
        expected = whole_logprobs(reference, rollout, media)
        assert np.abs(rollout.sampler_logprobs - expected)[rollout.mask].max() < 1e-4
