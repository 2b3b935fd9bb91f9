"""An engine whose work costs seconds of a clock that only it moves; all that is around it is real.

A sampler and a learner each have a time of their own. The learner's waits for what was gathered, the sampler's for what
was published, and nothing else in a schedule waits for anything: so these two rules give the times of a run exactly,
whatever the machine does meanwhile. ``pace`` sleeps what is counted, to see that a run by the clock says the same.

Simpler than real devices: several copies of the sampler's weights are one batch whose requests are spread evenly, a
sequence's caches cost the same at every length, and time passes in steps of ``GRAIN`` tokens.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from mmrl.engine.sampler.admissions import SteppingSampler, continued
from mmrl.engine_api import Cut, Learner, SamplingRequest, UpdateResult
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.types import Rollout, RolloutGroup, Sample, Segment, Turn

GRAIN = 32
"""Tokens that one simulated token stands for; so one step of the simulated sampler is as many of a real one."""


@dataclass(frozen=True)
class Load:
    """Work of a step, in real tokens.

    Attributes:
        median: Of the lengths of completions (of turns, with ``turns``), which are lognormal.
        of_prompt: Standard deviation of the logarithm between prompts; ``of_member`` that within a group.
        limit: Longest completion.
        turns: Most turns of an episode; 0 has completions. Each turn but the last is answered by a tool.
        tool_s: Median of a tool's seconds, which are lognormal with ``tool_spread``.
    """

    prompts: int = 64
    group: int = 16
    prompt_tokens: int = 1024
    median: float = 6000.0
    of_prompt: float = 0.6
    of_member: float = 0.67
    limit: int = 32768
    turns: int = 0
    tool_s: float = 3.0
    tool_spread: float = 0.8

    def tokens(self, prompt: str, seed: int) -> int:
        """Simulated tokens of a completion or a turn, by its prompt and its seed alone."""
        common, own = _normal(int(prompt[1:]), 7919), _normal(seed)
        length = math.exp(math.log(self.median) + self.of_prompt * common + self.of_member * own)
        return max(min(round(length), self.limit) // GRAIN, 1)

    def tool_seconds(self, seed: int) -> float:
        """Seconds of the tool that answers a turn, by the turn's seed."""
        return float(self.tool_s * math.exp(self.tool_spread * np.random.default_rng([seed, 1]).standard_normal()))

    def turns_of(self, prompt: str) -> int:
        """Turns of the episodes of a prompt: two to ``turns``."""
        return 2 + int(np.random.default_rng(int(prompt[1:])).integers(self.turns - 1))


@cache
def _normal(*seed: int) -> float:
    return float(np.random.default_rng(seed).standard_normal())


@dataclass(frozen=True)
class Costs:
    """Seconds of devices, by hand from published peaks: a model of 7 B parameters in bfloat16 on 80 GB of HBM3.

    Attributes:
        step_s: Of a step of the sampler: weights are read once (15 GB at 3.35 TB/s), kernels are started.
        sequence_s: More for each sequence of a device: its caches are read (57 kB a token, 8,000 tokens).
        prefill_s: Of a prompt's token on one device (15 GFLOP at 400 TFLOP/s).
        learn_s: Of a learned token on one device (76 GFLOP: forward, backward, recomputation, old log-probs).
        update_s: Of a step's optimizer, and what is around it.
        sync_s: Of new weights at the sampler.
        publish_s: Of weights that the learner sets aside.
        sequences: Most that a device's memory holds the caches of (55 GB).
    """

    step_s: float = 0.008
    sequence_s: float = 0.00014
    prefill_s: float = 0.00004
    learn_s: float = 0.00019
    update_s: float = 1.0
    sync_s: float = 3.0
    publish_s: float = 2.0
    sequences: int = 112


@dataclass
class Times:
    """The clocks of both sides, and what each waits for."""

    pace: float = 0.0
    sampler: float = 0.0
    learner: float = 0.0
    sampler_waited: float = 0.0
    learner_waited: float = 0.0
    published: dict[int, float] = field(default_factory=dict)
    gathered: list[float] = field(default_factory=list)
    answers_waited: float = 0.0
    sampled: float = 0.0
    sequence_seconds: float = 0.0

    def sample(self, seconds: float) -> None:
        self.sampler += seconds
        self._sleep(seconds)

    def learn(self, seconds: float) -> None:
        self.learner += seconds
        self._sleep(seconds)

    def await_weights(self, since: float) -> None:
        """The sampler goes on no earlier than this."""
        self.sampler_waited += max(since - self.sampler, 0.0)
        self.sampler = max(self.sampler, since)

    def await_answer(self, there: float) -> None:
        """The sampler's next step is made no earlier than this; counted apart from what it waits for weights."""
        self.answers_waited += max(there - self.sampler, 0.0)
        self.sampler = max(self.sampler, there)

    def await_groups(self, since: float) -> None:
        """The learner goes on no earlier than this."""
        self.learner_waited += max(since - self.learner, 0.0)
        self.learner = max(self.learner, since)

    def _sleep(self, seconds: float) -> None:
        if self.pace:
            time.sleep(seconds * self.pace)


class SimulatedSampler(SteppingSampler):
    """Implements ``engine_api.Sampler``; samples zeros, of which the first of a turn is its length."""

    def __init__(self, load: Load, costs: Costs, devices: int, times: Times) -> None:
        super().__init__()
        self._load, self._costs, self._devices, self._times = load, costs, devices, times
        self.weight_version = 0
        self._waiting = deque[tuple[int, int]]()  # ticket and member
        self._ends: list[tuple[int, int, int]] = []  # a heap of last step, ticket and member
        self._asked: dict[int, SamplingRequest] = {}
        self._lengths: dict[int, list[int]] = {}  # of a ticket's members: tokens that are left when it begins
        self._left: dict[int, int] = {}
        self._prefill = 0
        self._read = set[tuple[int, str]]()
        self._answers: list[tuple[int, float]] = []  # a heap of due step and the time at which it is there
        self._finished: dict[int, tuple[int, float, SamplingRequest]] = {}
        self._began: dict[int, int] = {}
        self._out = 0.0  # the time at which all answers are there that were missing at a cut

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        step, ended, asked = self._finished.pop(ticket)
        assert asked.answered_after is not None
        heapq.heappush(self._answers, (step + asked.answered_after, ended + self._load.tool_seconds(asked.seed)))
        super().answer(ticket, request)

    def enter(self) -> None:
        """Wait for the answers that were missing at the last cut."""
        self._times.await_answer(self._out)

    def settle(self) -> None:
        """Wait for all answers."""
        self._times.await_answer(max((there for _, there in self._answers), default=0.0))
        self._answers.clear()

    def cut(self) -> Sequence[Cut]:
        missing = [ended + self._load.tool_seconds(asked.seed) for _, ended, asked in self._finished.values()]
        self._out = max([*missing, *(there for _, there in self._answers)], default=0.0)
        self._answers.clear()
        return super().cut()

    def drop(self) -> None:
        super().drop()
        for each in (
            self._waiting, self._ends, self._asked, self._lengths, self._left, self._read, self._began, self._finished,
        ):  # fmt: skip
            each.clear()
        self._prefill = 0

    def _so_far(self, ticket: int) -> Segment | None:
        if (begun := self._began.get(ticket)) is None or self.admissions.step == begun:
            return None
        made = self._segment(self._asked[ticket], 0, self.admissions.step - begun)
        return replace(made, weight_version=self.weight_version)

    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        self._asked[ticket] = request
        self._lengths[ticket] = [self._remaining(request, member) for member in range(request.num_samples)]
        self._left[ticket] = request.num_samples
        self._waiting.extend((ticket, member) for member in range(request.num_samples))
        self._prefill += self._unread(request)

    def _remaining(self, request: SamplingRequest, member: int) -> int:
        turn = _turn_under_way(request)
        done = sum(len(segment.token_ids) for segment in turn)
        whole = int(turn[0].token_ids[0]) if turn else self._load.tokens(request.prompt.id, request.seed + member)
        return max(min(whole - done, request.max_new_tokens), 1)

    def _unread(self, request: SamplingRequest) -> int:
        """Tokens that have to be prefilled: a group's prompt once, and what no earlier turn has left in the cache."""
        known = request.prompt.key in self._read
        self._read.add(request.prompt.key)
        own = sum(len(segment.token_ids) for segment in request.segments)
        return own + (0 if known else len(request.prompt.token_ids))

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        step, costs, times = self.admissions.step, self._costs, self._times
        while self._answers and self._answers[0][0] <= step:
            times.await_answer(heapq.heappop(self._answers)[1])
        while self._waiting and len(self._ends) < costs.sequences * self._devices:
            ticket, member = self._waiting.popleft()
            self._began[ticket] = step
            heapq.heappush(self._ends, (step + self._lengths[ticket][member] - 1, ticket, member))
        each = math.ceil(len(self._ends) / self._devices)
        prefill, self._prefill = self._prefill, 0
        took = GRAIN * (costs.step_s + costs.sequence_s * each) + GRAIN * costs.prefill_s * prefill / self._devices
        times.sample(took)
        times.sampled += took
        times.sequence_seconds += took * len(self._ends) / self._devices
        done = list[tuple[int, RolloutGroup]]()
        while self._ends and self._ends[0][0] <= step:
            _, ticket, _ = heapq.heappop(self._ends)
            self._left[ticket] -= 1
            if not self._left[ticket]:
                done.append((ticket, self._group(ticket, step)))
        return done, True

    def _group(self, ticket: int, step: int) -> RolloutGroup:
        request = self._asked.pop(ticket)
        lengths = self._lengths.pop(ticket)
        del self._left[ticket], self._began[ticket]
        if request.answered_after is not None:
            self._finished[ticket] = step, self._times.sampler, request
        rollouts = (self._rollout(request, member, length) for member, length in enumerate(lengths))
        return RolloutGroup(request.prompt, tuple(rollouts))

    def _rollout(self, request: SamplingRequest, member: int, length: int) -> Rollout:
        facts: dict[str, Any] = {"finish_reason": "stop", "weight_version": self.weight_version}
        return continued(request, member, self._segment(request, member, length), text="a", **facts)

    def _segment(self, request: SamplingRequest, member: int, length: int) -> Segment:
        """The next so many tokens; those of a turn begin with how many there will be."""
        ids = np.zeros(length, np.int32)
        if not _turn_under_way(request):
            ids[0] = self._load.tokens(request.prompt.id, request.seed + member)
        return Segment(ids, True, np.full(length, -0.5, np.float32))


def _turn_under_way(request: SamplingRequest) -> list[Segment]:
    """The policy's segments of the turn that the request goes on with; empty if it begins one."""
    turn = list[Segment]()
    for segment in reversed(request.segments):
        if not segment.by_policy:
            break
        turn.insert(0, segment)
        if not segment.continues:
            break
    return turn


class SimulatedEngine(Learner):
    """Implements ``Engine``, ``Learner`` and the policy.

    Args:
        split: Devices that sample and devices that learn; equal numbers that are the same devices, unless ``apart``.
    """

    precision = "float32"

    def __init__(self, load: Load, costs: Costs, split: tuple[int, int], *, apart: bool, pace: float = 0.0) -> None:
        self.samples_apart, self.times, self._costs = apart, Times(pace), costs
        self._learners = split[1]
        self._sampler = SimulatedSampler(load, costs, split[0], self.times)
        self.networks = {"policy": self}  # type: ignore[dict-item]
        self.learned: list[tuple[float, int]] = []
        self.order: list[str] = []
        self.marks: list[tuple[float, ...]] = []
        self.updates = 0

    def publish(self) -> int:
        if self.updates not in self.times.published:
            self.times.learn(self._costs.publish_s * self.samples_apart)
            self.times.published[self.updates] = self.times.learner
        return self.updates

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[SimulatedSampler]:
        wanted = self.publish() if version is None else version
        self.times.await_weights(self.times.published[wanted])
        if wanted != self._sampler.weight_version:
            self.times.sample(self._costs.sync_s)
        self._sampler.weight_version = wanted
        self._sampler.enter()
        try:
            yield self._sampler
        finally:
            self._sampler.leave()
        self._sampler.settle()
        self.times.gathered.append(self.times.sampler)

    @contextmanager
    def learning(self) -> Iterator[SimulatedEngine]:
        yield self

    def score(self, samples: Sequence[Sample], *, way: str = "packed") -> list[Any]:
        return [] if way == "wide" else [sample.sampler_logprobs for sample in samples]

    def update(self, rows: Sequence[Any]) -> UpdateResult:
        times, costs = self.times, self._costs
        self.order += dict.fromkeys(row.sample.prompt.id for row in rows)
        times.await_groups(times.gathered[self.updates])
        tokens = GRAIN * sum(row.sample.num_tokens for row in rows)
        times.learn(costs.update_s + tokens * costs.learn_s / self._learners)
        self.updates += 1
        self.learned.append((times.learner, tokens))
        waited = (times.sampler_waited, times.answers_waited, times.learner_waited)
        self.marks.append((*waited, times.sampled, times.sequence_seconds))
        logprobs = [row.sample.sampler_logprobs for row in rows]
        return UpdateResult({"loss/policy": 0.0, "policy/grad_norm": 1.0}, logprobs, [-each for each in logprobs])

    def memory_bytes_max(self) -> int:
        return 1

    def span(self, name: str) -> Any:
        raise AssertionError("nothing is traced")

    def save(self, folder: Any) -> Any:
        raise AssertionError("nothing is saved")


class InstantPool:
    """Stands in for ``EnvironmentPool``: each call is answered at once; the sampler counts the tool's seconds."""

    seconds = 0.0

    def __init__(self, load: Load) -> None:
        self._load = load

    def open(self, prompt: Any, seed: int) -> Any:
        return _InstantSession(self._load.turns_of(prompt.id))

    def take_close_failures(self) -> list[Any]:
        return []


class _InstantSession:
    closed = None

    def __init__(self, turns: int) -> None:
        self._turns, first = turns, ReceivedObservation()
        self.opened = _done(first)
        self.answered: list[tuple[Turn | None, str]] = [(None, first.hash)]

    def step(self, turn: Turn) -> Future[ReceivedObservation]:
        found = ReceivedObservation(("x" * 8,), done=turn.index + 1 == self._turns)
        self.answered.append((turn, found.hash))
        return _done(found)

    def close(self) -> None:
        return None


def _done(value: Any) -> Future[Any]:
    future = Future[Any]()
    future.set_result(value)
    return future
