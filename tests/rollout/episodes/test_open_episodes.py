"""Episodes that go on from step to step, with real environments and a sampler that writes a character a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.data.order import part_seed, request_seed
from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.rollout.partial import PartialCollector
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.step.gather import Rollouts
from mmrl.step.source import Left
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, GroupKey, Message, Prompt, RawImage, policy_turns
from tests.rollout.episodes.fakes import END, LetterEncoder, media, without_clock
from tests.scripted_sampler import ScriptedSampler

SIZE, SEED, STEPS = 3, 5, 12
IMAGE = "show ['seen', np.full((2, 3), 7, np.uint8)]"
FIRST = "[f'puzzle {seed % 97}', np.full((2, 2), 3, np.uint8)]"
TURNS = ("hello" * 5, "dice", "pay 1", IMAGE, "end", "a longer thought " * 3, "sleep 0.02")


class Plain(Algorithm):
    source = "rollouts"
    aggregation = None

    def needs(self) -> Needs:
        return Needs()

    def credit(self, batch: Any) -> Any:
        raise AssertionError

    def loss(self, tokens: Any) -> Any:
        raise AssertionError


def some_turn(name: str, member: int, turn: int) -> str:
    """Turns of many lengths; the second one of an episode in the fourth group fails."""
    if (name, member, turn) == ("p3", 1, 1):
        return "raise_it"
    return TURNS[np.random.default_rng([int(name[1:]), member, turn]).integers(len(TURNS))]


class Run:
    """A run's steps up to learning, of two prompts each; each step has weights of the next version."""

    def __init__(
        self, pool: EnvironmentPool, folder: Path, turns: Callable[[str, int, int], str] = some_turn, **environment: Any
    ) -> None:
        spec = {"name": "game", "max_turns": 4, "latency_steps": 6, **environment}
        self.config = from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train": {"name": "rows"}},
                "algorithm": {"name": "any"},
                "environment": spec,
                "sampler": {"group_size": SIZE, "max_new_tokens": 150, "partial": {"engine_steps": 16, "in_flight": 3}},
                "trainer": {"steps": 100, "prompts_per_step": 2, "seed": SEED},
            }
        )
        assert self.config.environment is not None
        self.folder, self.turns, self.drawn, self.step = folder, turns, 0, 0
        self.encoder = LetterEncoder(store := media(folder))
        self.sampler = ScriptedSampler(self._write, lambda ids: "".join(chr(i) for i in ids if i != END))
        self.events: list[dict[str, Any]] = []
        self.pool = pool
        player = EpisodePlayer(self.config.environment, 150, ("length",), pool, self.encoder, store)
        parts: dict[str, Any] = {"event": self._event, "player": player}
        self.collector = PartialCollector(self.config, self, Scorer(()), lambda *news: None, **parts)
        encoder: Any = self.encoder
        self.source = Rollouts(self.config, Plain(None), encoder, self.collector, self._event)

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[ScriptedSampler]:
        try:
            yield self.sampler
        finally:
            self.sampler.leave()

    def take(self) -> SampledStep:
        self.sampler.weight_version = self.step
        self.step += 1
        return self.source.gather(self.step, self._draw, Clock())

    def state(self) -> dict[str, Any]:
        left = self.source.left.state()
        state: dict[str, Any] = json.loads(json.dumps({"drawn": self.drawn, "step": self.step, **left}))
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.step = state["drawn"], state["step"]
        self.source.go_back(self.source.resumed(Left.of(state, self.folder), self._find))

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def _draw(self, count: int) -> list[tuple[int, EncodedPrompt]]:
        first, self.drawn = self.drawn, self.drawn + count
        return [(0, self.encoder.encode(row(number))) for number in range(first, self.drawn)]

    def _find(self, keys: Any) -> dict[GroupKey, Prompt]:
        return {key: row(int(key[1][1:])) for key in keys}

    def _write(self, request: SamplingRequest) -> Sequence[int]:
        name = request.prompt.id
        seed, turns = request_seed(SEED, request.prompt.epoch, name, 0), policy_turns(request.segments)
        parts = turns.pop() if request.goes_on else ()
        if parts:
            seeds = [part_seed(seed, member, name, len(parts), len(turns)) for member in range(SIZE)]
        else:
            seeds = [request_seed(seed, member, name, len(turns)) for member in range(SIZE)]
        ids = [*map(ord, self.turns(name, seeds.index(request.seed), len(turns))), END]
        return ids[sum(len(part.token_ids) for part in parts) :]


def row(number: int) -> Prompt:
    """A question with an image, which its environment is given as it is in the dataset."""
    raw = RawImage(PNG, f"row {number}")
    return Prompt(f"p{number}", (Message("user", "<image>go"),), (raw,), columns={"number": number})


def _png() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 2), (9, 8, 7)).save(file, "PNG")
    return file.getvalue()


PNG = _png()


def facts(step: SampledStep) -> list[Any]:
    """All of a step that must not depend on the clock."""
    parts = [
        [(part.weight_version, part.continues, part.finish_reason, len(part.token_ids)) for part in rollout.segments]
        for group in step.learned
        for rollout in group.rollouts
    ]
    images = [[ref.hash for ref in rollout.all_images] for group in step.learned for rollout in group.rollouts]
    rewards = [group.rewards.tolist() for group in step.learned]
    keys = [[group.key for group in each] for each in (step.groups, step.carried)]
    return [
        step.step,
        keys,
        dict(step.stats),
        rewards,
        parts,
        images,
        *(without_clock(each.group) for each in step.learned),
    ]


@pytest.fixture(scope="module")
def unbroken(game, tmp_path_factory):
    """States before each step, the steps, and the last state, of a run whose environments take no time."""
    with EnvironmentPool(game(first=FIRST)) as pool:
        run, states, steps = Run(pool, tmp_path_factory.mktemp("unbroken")), [], []
        for _ in range(STEPS):
            states.append(run.state())
            steps.append(run.take())
        final, events = run.state(), run.events
        run.collector.close()
        assert [lane.num_sessions for lane in pool._lanes] == [0]
    return run, states, steps, final, events


def test_episodes_are_what_they_would_be_in_one_piece(unbroken):
    run, _, steps, _, events = unbroken
    rollouts = [rollout for step in steps for group in step.learned for rollout in group.rollouts]
    assert all(len(step.learned) == 2 for step in steps)
    for rollout in (each for each in rollouts if not each.failure):
        texts = [run.turns(rollout.prompt.id, rollout.index, turn) for turn in range(len(rollout.episode))]
        turns, is_cut = policy_turns(rollout.segments), rollout.finish_reason == "length"
        written = [[int(i) for part in turn for i in part.token_ids] for turn in turns]
        whole = [[*map(ord, text), END] for text in texts]
        assert written[:-1] == whole[:-1] and written[-1] == whole[-1][: len(written[-1])]
        assert is_cut == (written[-1] != whole[-1]) and (sum(map(len, written)) == 150) == is_cut
        assert [turn[-1].finish_reason for turn in turns] == ["stop"] * (len(turns) - 1) + [
            "length" if is_cut else "stop"
        ]
        assert rollout.turns[:-1] == tuple(texts[:-1]) and texts[-1].startswith(rollout.text)
        for turn in turns:
            assert [part.finish_reason for part in turn[:-1]] == [None] * (len(turn) - 1)
            versions = [part.weight_version for part in turn]
            assert versions == list(range(versions[0], versions[0] + len(turn)))
        versions = [part.weight_version for part in rollout.segments if part.by_policy]
        assert versions == sorted(versions) and rollout.weight_version == versions[-1]
        # The turn that is cut is not answered.
        assert rollout.components["length"] == sum(map(len, texts[:-1] if is_cut else texts))
        assert is_cut or rollout.finish_reason == ("environment" if "end" in texts else "turns")
        assert rollout.prompt.text.startswith("<image>go") and len(rollout.prompt.images) == 2
    assert {rollout.finish_reason for rollout in rollouts} >= {"environment", "turns", "length"}
    many = [turn for rollout in rollouts for turn in policy_turns(rollout.segments)]
    assert (
        sum(len(turn) > 1 for turn in many) > 10
        and max(len({p.weight_version for p in r.segments}) for r in rollouts) > 3
    )
    failed = [rollout for rollout in rollouts if rollout.failure]
    assert [rollout.key for rollout in failed] == [(0, "p3", 1)] and failed[0].components["length"] is None
    assert [event["kind"] for event in events] == ["environment_failed"]
    assert sum(step.stats["episode/failed_calls_fraction"] > 0 for step in steps) == 1


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_nothing_depends_on_the_time_that_environments_take(unbroken, game, workers):
    before, states, steps, final, _ = unbroken
    with EnvironmentPool(game(first=FIRST, naps=True, workers=workers)) as pool:
        run = Run(pool, before.folder)
        for state, step in zip(states, steps, strict=True):
            assert run.state() == state
            assert facts(run.take()) == facts(step)
        assert run.state() == final and [event["kind"] for event in run.events] == ["environment_failed"]
        run.collector.close()
        assert [lane.num_sessions for lane in pool._lanes] == [0] * workers


def test_a_run_that_goes_on_at_any_step_plays_its_episodes_again(unbroken, game):
    before, states, steps, _, _ = unbroken
    groups = [group for state in states for group in state["unfinished_groups"]]
    assert sum(group["goes_on"] for group in groups) > 20
    left = [group for group in groups if group["goes_on"] and group.get("episode")]
    assert any(turns[-1]["content"] is None for turns in (group["episode"] for group in left))  # an answer is out
    last = [group["segments"][-1] for group in left]
    assert sum(part["by_policy"] and part["finish_reason"] is None for part in last) > 10  # in the middle of a turn
    assert any(part.get("continues") for part in last) and not all(part.get("continues") for part in last)
    with EnvironmentPool(game(first=FIRST, workers=2)) as pool:
        for number in range(1, STEPS, 2):
            run = Run(pool, before.folder)
            run.restore(states[number])
            assert run.state() == states[number]
            for step in steps[number : number + 2]:
                assert facts(run.take()) == facts(step)
            run.collector.close()
        assert [lane.num_sessions for lane in pool._lanes] == [0, 0]
