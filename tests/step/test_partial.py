"""Rollouts that are sampled in parts, with a scripted sampler that writes one token an engine step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.data.order import part_seed, request_seed
from mmrl.engine_api import SamplingRequest
from mmrl.errors import ConfigError, NumericsError
from mmrl.interfaces import Algorithm, Needs, Refill
from mmrl.rollout.batch import SampledStep
from mmrl.rollout.partial import PartialCollector
from mmrl.rollout.rewards.failures import Failure, Failures, RewardError
from mmrl.rollout.unfinished import unfinished_among
from mmrl.step.gather import Rollouts, step_groups
from mmrl.step.source import Left, Source
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, Message, Prompt, Rollout, RolloutGroup, ScoredGroup
from tests.scripted_sampler import ScriptedSampler

Lengths = Callable[[str, int], int]
"""The length of the completion of a member of a prompt."""


class Chosen(Algorithm):
    """Keeps the groups whose prompt's number ``keep`` accepts."""

    source = "rollouts"
    aggregation = None

    def __init__(self, keep: Callable[[int], bool] | None = None, refill: Refill | None = None) -> None:
        self._keep, self._refill = keep, refill

    def needs(self) -> Needs:
        return Needs(refill=None if self._keep is None else self._refill or Refill())

    def select(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        assert self._keep is not None
        return [self._keep(int(group.group.prompt.id)) for group in groups]

    def credit(self, batch: Any) -> Any:
        raise AssertionError

    def loss(self, tokens: Any) -> Any:
        raise AssertionError


class Instant:
    """A scorer whose scores are the members' lengths; a rollout of which ``fails`` is true fails."""

    def __init__(self, fails: Callable[[Rollout], bool] = lambda rollout: False) -> None:
        self._fails = fails

    def submit(self, group: RolloutGroup, failures: Failures, *, needed: bool = True) -> Future[ScoredGroup]:
        values = np.array([len(rollout.token_ids) for rollout in group.rollouts], np.float64)
        valid = ~np.array([self._fails(rollout) for rollout in group.rollouts])
        for place in np.flatnonzero(~valid):
            failures.add(Failure("length", group.rollouts[place], "ended its worker"))
        failures.check()
        future: Future[ScoredGroup] = Future()
        future.set_result(ScoredGroup(group, np.where(valid, values, 0.0), valid, {"length": values}))
        return future


class Sampled:
    """A run's steps up to learning, of as many prompts as are drawn; prompt 3 is called 3.

    Each step has weights of the next version.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        algorithm: Algorithm | None = None,
        scorer: Any = None,
        size: int = 3,
        prompts: int = 4,
        engine_steps: int = 16,
        in_flight: float = 1.5,
        most: int = 4000,
    ) -> None:
        self._lengths, self.algorithm = lengths, algorithm or Chosen()
        self.config = from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train": {"name": "rows"}},
                "rewards": [{"name": "length"}],
                "algorithm": {"name": "any"},
                "sampler": {
                    "group_size": size,
                    "max_new_tokens": most,
                    "partial": {"engine_steps": engine_steps, "in_flight": in_flight},
                },
                "trainer": {"steps": 1000, "prompts_per_step": prompts},
            }
        )
        self.sampler = ScriptedSampler(self._write)
        self.events: list[tuple[str, Any]] = []
        self.drawn, self.step = 0, 0
        self.collector = PartialCollector(self.config, self, scorer or Instant(), lambda *news: None, event=self._event)
        self.source: Source = Rollouts(self.config, self.algorithm, self, self.collector, self._event)

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[ScriptedSampler]:
        try:
            yield self.sampler
        finally:
            self.sampler.leave()

    def take(self) -> SampledStep:
        """The next step."""
        self.sampler.weight_version = self.step
        self.step += 1
        return self.source.gather(self.step, self._draw, Clock())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(
            json.dumps({"drawn": self.drawn, "step": self.step, **self.source.left.state()})
        )
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.step = state["drawn"], state["step"]
        self.source.go_back(self.source.resumed(Left.of(state, Path("media")), lambda keys: {}))

    def _event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def _draw(self, count: int) -> list[tuple[int, EncodedPrompt]]:
        first, self.drawn = self.drawn, self.drawn + count
        return [(number // 10**6, prompt(number)) for number in range(first, self.drawn)]

    def _write(self, request: SamplingRequest) -> Sequence[int]:
        seed = request_seed(self.config.trainer.seed, request.prompt.epoch, request.prompt.id, 0)
        parts, name = len(request.segments), request.prompt.id
        seeds = [
            part_seed(seed, member, name, parts) if parts else seed + member
            for member in range(self.config.sampler.group_size)
        ]
        member = seeds.index(request.seed)
        return self.tokens(name, member)[sum(len(part.token_ids) for part in request.segments) :]

    def tokens(self, name: str, member: int) -> list[int]:
        """A completion."""
        return [7 * int(name) + 3 * member + place for place in range(self._lengths(name, member))]


def prompt(number: int) -> EncodedPrompt:
    row = Prompt(str(number), (Message("user", "x" * 5),))
    return EncodedPrompt(prompt=row, text="x", token_ids=np.zeros(5, np.int32), images=())


def lognormal(seed: int = 0, longest: Mapping[tuple[str, int], int] | None = None) -> Lengths:
    """Lengths of a median of twelve tokens with a long tail."""

    def length(name: str, member: int) -> int:
        drawn = np.random.default_rng([seed, int(name), member]).lognormal(2.5, 1.0)
        return (longest or {}).get((name, member), 1 + int(drawn))

    return length


def names(groups: Sequence[Any]) -> list[int]:
    return [int(group.key[1]) for group in groups]


def simulated(lengths: Lengths, steps: int, *, size: int, prompts: int, engine_steps: int, in_flight: int) -> list[Any]:
    """What each step learns, found token by token with nothing but lists."""
    line: list[int] = []
    left: dict[int, list[int]] = {}
    drawn, learned = 0, []
    for _ in range(steps):
        while len(line) < in_flight:
            line.append(drawn)
            left[drawn] = [lengths(str(drawn), member) for member in range(size)]
            drawn += 1
        made = 0
        while made < engine_steps or sum(not any(left[each]) for each in line) < prompts:
            if not any(any(left[each]) for each in line):
                break
            made += 1
            for each in line:
                left[each] = [max(count - 1, 0) for count in left[each]]
        done = [each for each in line if not any(left[each])][:prompts]
        learned.append(done)
        line = [each for each in line if each not in done]
    return learned


def test_no_prompt_is_lost_or_repeated_and_each_step_learns_the_first_that_are_finished() -> None:
    lengths = lognormal(longest={("5", 1): 1500})
    run = Sampled(lengths)
    steps = [run.take() for _ in range(80)]
    wanted = simulated(lengths, 80, size=3, prompts=4, engine_steps=16, in_flight=6)
    assert [names(step.learned) for step in steps] == wanted
    learned, left = [name for step in steps for name in names(step.learned)], names(run.source.left.carried)
    assert sorted([*learned, *left]) == list(range(run.drawn)) and len(learned) == 320
    assert all(len(step.learned) == 4 and step.learns_all for step in steps)
    assert all(names(step.carried) == sorted(names(step.carried)) for step in steps)
    # The long one was in flight for many steps, and others were learned past it.
    (at,) = [number for number, step in enumerate(steps) if 5 in names(step.learned)]
    assert at > 20 and max(name for step in steps[:at] for name in names(step.learned)) > 60


def test_completions_are_what_they_would_be_in_one_piece_under_rising_versions() -> None:
    lengths = lognormal(longest={("5", 1): 1500})
    run = Sampled(lengths)
    found = {}
    for number in range(80):
        step = run.take()
        for group in step.learned:
            assert [rollout.index for rollout in group.rollouts] == [0, 1, 2]
            for rollout in group.rollouts:
                assert rollout.token_ids.tolist() == run.tokens(rollout.prompt.id, rollout.index)
                assert rollout.text == " ".join(map(str, rollout.token_ids)) and rollout.finish_reason == "stop"
                assert rollout.sampler_logprobs.tolist() == [-0.5] * len(rollout.token_ids)
                versions = [segment.weight_version for segment in rollout.segments]
                assert [segment.continues for segment in rollout.segments] == [k > 0 for k in range(len(versions))]
                assert rollout.turn_of_token.tolist() == [0] * len(rollout.token_ids)
                if len(versions) > 1:
                    assert versions == list(range(versions[0], versions[-1] + 1)) and versions[-1] <= number
                    found[rollout.key] = rollout
                assert rollout.weight_version <= number
    longest = found[0, "5", 1]
    assert len(longest.segments) > 20 and longest.segments[0].weight_version == 0
    assert sum(len(rollout.segments) > 2 for rollout in found.values()) > 10


@pytest.mark.parametrize(("engine_steps", "in_flight", "prompts"), [(16, 1.0, 1), (64, 4.0, 3), (16, 2.3, 5)])
def test_any_shape_of_a_round_learns_what_a_simulation_of_lists_learns(
    engine_steps: int, in_flight: float, prompts: int
) -> None:
    shape: dict[str, Any] = {"size": 2, "prompts": prompts, "engine_steps": engine_steps}
    run = Sampled(lognormal(7), in_flight=in_flight, **shape)
    steps = [run.take() for _ in range(30)]
    groups = math.ceil(round(in_flight * prompts, 9))
    assert [names(step.learned) for step in steps] == simulated(lognormal(7), 30, in_flight=groups, **shape)


def test_a_run_that_goes_on_at_any_step_is_the_unbroken_one() -> None:
    lengths = lognormal(3, {("2", 0): 400})
    run, states, steps = Sampled(lengths), [], []
    for _ in range(25):
        states.append(run.state())
        steps.append(run.take())
    final = run.state()
    assert any(state["unfinished_groups"] for state in states) and any(state["carried_groups"] for state in states)
    for number, state in enumerate(states):
        again = Sampled(lengths)
        again.restore(state)
        assert again.state() == state
        for step in steps[number : number + 4]:
            assert facts(again.take()) == facts(step)
    last = Sampled(lengths)
    last.restore(states[-1])
    last.take()
    assert last.state() == final


def facts(step: SampledStep) -> list[Any]:
    """All of a step that matters, comparable."""
    return [
        (step.step, names(step.groups), names(step.carried), dict(step.stats)),
        *(
            (
                group.key, group.place, group.kept, group.rewards.tolist(), group.valid.tolist(),
                [(s.token_ids.tolist(), s.sampler_logprobs.tolist(), s.weight_version, s.continues)
                 for rollout in group.rollouts for s in rollout.segments],
                [(rollout.index, rollout.text, rollout.weight_version) for rollout in group.rollouts],
            )
            for group in step.learned
        ),
    ]  # fmt: skip


def test_rejected_groups_are_replaced_and_each_group_is_recorded_once() -> None:
    run = Sampled(lognormal(1), algorithm=Chosen(lambda number: number % 3 != 0))
    steps = [run.take() for _ in range(40)]
    for step in steps:
        assert len(step.learned) == 4 and all(number % 3 for number in names(step.learned))
        assert [group.kept for group in step.groups] == [number % 3 != 0 for number in names(step.groups)]
        assert names(step.learned) == sorted(names(step.learned))
        # As a record has them: rounds, and the place of each group within.
        places = [group.place for group in step.groups]
        assert places == sorted(places) and len({*places}) == len(places)
        assert set(names(step_groups(step, ()))) == set(names(step.groups))
    recorded = [name for step in steps for name in names(step.groups)]
    assert sorted([*recorded, *names(run.source.left.carried)]) == list(range(run.drawn))
    assert any(step.rounds > 1 for step in steps) and any(step.carried for step in steps)


@pytest.mark.parametrize("action", ["train_partial", "skip", "stop"])
def test_a_step_that_starves_learns_less_or_waits_or_ends_the_run(action: Any) -> None:
    refill = Refill(max_rounds=1, on_starvation=action)
    run = Sampled(lognormal(2), algorithm=Chosen(lambda number: number >= 14 or number in (1, 7), refill))
    steps = []
    for _ in range(12):
        steps.append(run.take())
        if steps[-1].fault is not None:
            break
    starved = [fields for kind, fields in run.events if kind == "starved"]
    assert starved and starved[0]["action"] == action
    if action == "stop":
        assert isinstance(steps[0].fault, NumericsError) and steps[0].learned == () and steps[0].groups
        return
    learned = [name for step in steps for name in names(step.learned)]
    assert len({*learned}) == len(learned) and not {*learned} & {0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13}
    rejected = [
        name for step in steps for name, group in zip(names(step.groups), step.groups, strict=True) if not group.kept
    ]
    assert sorted([*learned, *rejected, *names(run.source.left.carried)]) == list(range(run.drawn))
    sizes = [len(step.learned) for step in steps]
    if action == "skip":
        assert sizes[0] == 0 and {*sizes} == {0, 4}
        # Those of a skipped step come first; they are in its record, and not in that of the step that learns them.
        first = next(step for step in steps if step.learned)
        waited = [name for name, group in zip(names(first.learned), first.learned, strict=True) if group.place is None]
        assert waited and waited == names(first.learned)[: len(waited)] and not {*waited} & {*names(first.groups)}
    else:
        assert 0 < sizes[0] < 4 and sizes[-1] == 4


def test_failures_of_rewards_count_against_the_groups_of_the_step_that_scores_them() -> None:
    bad = {(3, 0), (9, 2)}
    run = Sampled(
        lognormal(4), scorer=Instant(lambda rollout: (int(rollout.prompt.id), rollout.index) in bad), size=8, prompts=8
    )
    steps = [run.take() for _ in range(4)]
    told = [fields for kind, fields in run.events if kind == "reward_failed"]
    assert sorted((int(each["prompt"]), each["member"]) for each in told) == sorted(bad)
    shares = [step.stats["reward/length_failed_fraction"] for step in steps]
    assert sum(share > 0 for share in shares) in (1, 2) and max(shares) <= 2 / 64
    learned = {group.key[1]: group for step in steps for group in step.learned}
    assert learned["3"].valid.tolist() == [False] + [True] * 7


def test_too_many_failures_end_the_run_with_the_groups_that_were_finished() -> None:
    run = Sampled(lognormal(4), scorer=Instant(lambda rollout: int(rollout.prompt.id) > 3))
    step = run.take()
    assert isinstance(step.fault, RewardError) and step.groups and step.learned == ()
    assert all(not group.valid.any() for group in step.groups)


def test_a_run_without_parts_refuses_a_checkpoint_with_groups_in_flight() -> None:
    """Finished ones too: tokens of older weights would count as a mismatch in a run that samples no parts."""
    for engine_steps, unfinished in ((16, 2), (5000, 0)):
        run = Sampled(lognormal(3), engine_steps=engine_steps)
        run.take()
        left = Left.of(run.state(), Path("media"))
        assert (len(left.carried), len(unfinished_among(left.carried))) == (2, unfinished)
        plain = from_mapping({**run.config.model_dump(exclude_unset=True), "sampler": {"group_size": 3}})
        source = Rollouts(plain, run.algorithm, run, run.collector, run._event)
        with pytest.raises(ConfigError, match=f"the checkpoint has 2 groups in flight, {unfinished} of them still"):
            source.resumed(left, lambda keys: {})
        assert source.resumed(Left(in_parts=True), lambda keys: {}) == Left()


def test_all_parts_of_a_completion_share_its_longest_length() -> None:
    run = Sampled(lambda name, member: 100 if name == "2" else 3, most=40, engine_steps=16)
    groups = {group.key[1]: group for _ in range(6) for group in run.take().learned}
    assert [len(rollout.token_ids) for rollout in groups["2"].rollouts] == [40] * 3
    assert {rollout.finish_reason for rollout in groups["2"].rollouts} == {"length"}
    assert all(len(rollout.segments) > 1 for rollout in groups["2"].rollouts)
