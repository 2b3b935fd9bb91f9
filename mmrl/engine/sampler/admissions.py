"""Which requests a sampler admits at which of its steps, where it stops, and samplers that go by it."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np

from mmrl.engine_api import EAGER, Cut, Finished, Polled, Sampler, SamplingRequest
from mmrl.types import GroupKey, IntArray, Rollout, RolloutGroup, Sample, Segment


class Admissions:
    """Counts a sampler's steps, and decides at which of them each request is admitted.

    A request is due when it is submitted. The answer to one that finishes at step s is due at step s +
    ``answered_after``, or when it is given if that is ``EAGER``. What is due is admitted in the order of due step and
    ticket, before the step is made. No step is made while an answer is due and not given, also if it will be None. When
    nothing runs, the count jumps to the earliest step at which something is due. So the steps at which requests are
    admitted do not depend on when answers are given, except for ``EAGER`` ones.

    ``stop_after`` ends the steps. Before each step, when all answers that are due are known, it is asked whether so
    many steps are made and so many groups are over. An answer that is due later counts for nothing, given or not: what
    is over at the stop does not depend on time either. A jump of the count ends at the stop.

    Args:
        most: Most requests that are admitted at a step, where those of a prompt that may be cut are one; None for any
            number. What is left goes first at the next step.
        most_tokens: Fewer are admitted if they bring so many new tokens.

    Attributes:
        step: The number of the next step, or of the one under way.
        running: Tickets of the requests that are being sampled, each with the step at which it was admitted.
        stopped: True from a stop on, until ``stop_after`` is called again, or ``drop``.
    """

    def __init__(self, most: int | None = None, most_tokens: int | None = None) -> None:
        self._most, self._most_tokens = most or inf, most_tokens or inf
        self.step = 0
        self.running: dict[int, int] = {}
        self.stopped = False
        self._num_tickets = 0
        self._is_under_way = False
        self._requests: dict[int, SamplingRequest] = {}  # of the tickets that run or are ready
        self._ready: list[tuple[int, int, bool]] = []  # a heap of due step and ticket; True for answers
        self._ends: list[tuple[int, int]] = []  # a heap of due step and ticket, answered by None
        self._owed: dict[int, int] = {}  # due step of each answer that is not given
        self._owed_eagerly: set[int] = set()
        self._groups: dict[int, GroupKey] = {}  # of each ticket that may be cut, and is not over
        self._left: Counter[GroupKey] = Counter()  # those tickets by group
        self._groups_over = 0
        self._over: list[int] = []  # tickets that are over, not told yet
        self._stop: tuple[int, int] | None = None  # the step, and how many groups are then over

    def submit(self, requests: Sequence[SamplingRequest]) -> list[int]:
        """Tickets of new requests; they count from 0."""
        assert self._stop is None or self.stopped, "requests are submitted before the sampler is told where to stop"
        if not (self.running or self._owed or self._requests):
            # All episodes are over. The count goes on to the step at which the last of their ends is due, as it would
            # have in a poll: whether there was one after the last answer depends on how long the tools took.
            self.admit()
        tickets = list(range(self._num_tickets, self._num_tickets + len(requests)))
        self._num_tickets += len(requests)
        for ticket, request in zip(tickets, requests, strict=True):
            if request.may_be_cut:
                assert request.num_samples == 1 and request.answered_after != EAGER, "this request cannot be cut"
                self._groups[ticket] = request.prompt.key
                self._left[request.prompt.key] += 1
            self._make_ready(ticket, request, self.step)
        return tickets

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        """Take the answer to a finished request; None ends the episode."""
        assert ticket in self._owed or ticket in self._owed_eagerly, f"ticket {ticket} waits for no answer"
        self._owed_eagerly.discard(ticket)
        due = self._owed.pop(ticket, self.step)
        if request is None:
            heapq.heappush(self._ends, (due, ticket))
        else:
            self._make_ready(ticket, request, due, is_answer=True)

    def stop_after(self, engine_steps: int, groups: int) -> None:
        """See ``Sampler.stop_after``."""
        self._stop, self.stopped = (self.step + engine_steps, self._groups_over + groups), False

    def take_over(self) -> tuple[int, ...]:
        """Tickets that are over since this was last called."""
        over, self._over = tuple(self._over), []
        return over

    def cut(self) -> list[tuple[int, SamplingRequest]]:
        """The requests that run or are due at a stop, by ticket."""
        assert self.stopped, "a sampler is cut where it has stopped"
        due = [ticket for step, ticket, _ in self._ready if step <= self.step]
        return [(ticket, self._requests[ticket]) for ticket in sorted({*self.running, *due})]

    @property
    def owes_eagerly(self) -> bool:
        """True if an answer is missing that will be admitted when it is given."""
        return bool(self._owed_eagerly)

    @property
    def waits(self) -> tuple[int, ...]:
        """Tickets without whose answers the next step cannot be made; asked after ``admit``."""
        due = sorted((due, ticket) for ticket, due in self._owed.items() if due <= self.step)
        if due or self.running:
            return tuple(ticket for _, ticket in due if not self._is_under_way)
        return tuple(sorted(self._owed_eagerly))

    def admit(self) -> list[tuple[int, SamplingRequest]]:
        """Requests that the next step begins with, each with its ticket; none while an answer is waited for, or at a
        stop."""
        admitted = list[tuple[int, SamplingRequest]]()
        while not self._is_under_way and not self.stopped:
            self._jump()
            if min(self._owed.values(), default=inf) <= self.step:
                break
            has_ended = self._take_ends()
            self.stopped = self._is_at_stop
            if self._ready and self._ready[0][0] <= self.step and not self.stopped:
                admitted = self._take_ready()
                break
            if not has_ended:
                break
        self.running.update((ticket, self.step) for ticket, _ in admitted)
        return admitted

    def finish(self, groups: Iterable[tuple[int, RolloutGroup]], *, ends_step: bool = True) -> tuple[Finished, ...]:
        """Groups that the step has finished, each with its ticket.

        Args:
            ends_step: False if the same step is going to finish more.
        """
        finished = list[Finished]()
        for ticket, group in groups:
            finished.append(Finished(ticket, self.running.pop(ticket), self.step, group))
            request = self._requests.pop(ticket)
            if request.answered_after == EAGER:
                self._owed_eagerly.add(ticket)
            elif request.answered_after is not None:
                self._owed[ticket] = self.step + request.answered_after
            else:
                self._end(ticket)
        self._is_under_way = not ends_step
        self.step += ends_step
        return tuple(finished)

    def drop(self) -> None:
        """Forget all requests; steps and tickets count on."""
        for each in (
            self.running, self._requests, self._ready, self._ends, self._owed, self._owed_eagerly, self._groups,
            self._left, self._over,
        ):  # fmt: skip
            each.clear()
        self._is_under_way = self.stopped = False
        self._stop, self._groups_over = None, 0

    def _make_ready(self, ticket: int, request: SamplingRequest, due: int, *, is_answer: bool = False) -> None:
        self._requests[ticket] = request
        heapq.heappush(self._ready, (due, ticket, is_answer))

    @property
    def _has_enough_groups(self) -> bool:
        return self._stop is not None and self._groups_over >= self._stop[1]

    @property
    def _is_at_stop(self) -> bool:
        """True if no further step is to be made; all answers that are due are known."""
        is_left = self.running or self._ready or self._ends or self._owed or self._owed_eagerly
        return self._stop is not None and (not is_left or (self._has_enough_groups and self.step >= self._stop[0]))

    def _jump(self) -> None:
        """Count on to the earliest step at which something is due, or to the stop, if nothing runs."""
        if self.running or self._owed_eagerly:
            return
        due = [*(each[0] for each in (*self._ready[:1], *self._ends[:1])), *self._owed.values()]
        if due and self._stop is not None and self._has_enough_groups:
            due.append(self._stop[0])
        self.step = max(self.step, min(due, default=0))

    def _take_ends(self) -> bool:
        """End the tickets whose None is due; True if there are any."""
        first = self._ends[:1]
        while self._ends and self._ends[0][0] <= self.step:
            self._end(heapq.heappop(self._ends)[1])
        return self._ends[:1] != first

    def _take_ready(self) -> list[tuple[int, SamplingRequest]]:
        """Requests that are due, as many as a step begins with."""
        taken, units, tokens = list[tuple[int, SamplingRequest]](), set[Any](), 0
        while self._ready and self._ready[0][0] <= self.step and tokens < self._most_tokens:
            _, ticket, is_answer = self._ready[0]
            request = self._requests[ticket]
            # The prompt of requests that may be cut is read once for all of them; an episode's turns before were read.
            is_shared = request.may_be_cut and not is_answer
            unit = request.prompt.key if is_shared else ticket
            if unit not in units and len(units) >= self._most:
                break
            heapq.heappop(self._ready)
            taken.append((ticket, request))
            whole, prompt = Sample(request.prompt, request.segments).num_tokens, len(request.prompt.token_ids)
            if is_answer:
                tokens += _new_tokens(request)
            else:
                tokens += whole - prompt * (is_shared and unit in units)
            units.add(unit)
        return taken

    def _end(self, ticket: int) -> None:
        """Note that a ticket is over."""
        if (key := self._groups.pop(ticket, None)) is None:
            return
        self._over.append(ticket)
        self._left[key] -= 1
        self._groups_over += not self._left[key]


class SteppingSampler(Sampler):
    """A sampler that works in steps; kinds of it say what a step does.

    Args:
        most: As those of ``Admissions``.

    Attributes:
        admissions: Begins anew where ``Engine.sampling`` is entered.
    """

    def __init__(self, *most: int | None) -> None:
        self._most = most
        self.admissions = Admissions(*most)

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        return self.admissions.submit(requests)

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        self.admissions.answer(ticket, request)

    def poll(self) -> Polled:
        admissions = self.admissions
        while True:
            for ticket, request in admissions.admit():
                self._begin(ticket, request)
            if admissions.stopped:
                return Polled(stopped=True, over=admissions.take_over())
            if waits := admissions.waits:
                return Polled(waits=waits, over=admissions.take_over())
            if not admissions.running:
                return Polled(over=admissions.take_over())
            groups, ends_step = self._advance()
            if (finished := admissions.finish(groups, ends_step=ends_step)) or admissions.owes_eagerly:
                return Polled(finished, over=admissions.take_over())

    def stop_after(self, engine_steps: int, groups: int) -> None:
        self.admissions.stop_after(engine_steps, groups)

    def cut(self) -> Sequence[Cut]:
        requests = self.admissions.cut()
        cuts = [Cut(ticket, going_on(request, self._so_far(ticket))) for ticket, request in requests]
        self.drop()
        self.forget_prompts()
        return cuts

    def drop(self) -> None:
        self.admissions.drop()

    def leave(self) -> None:
        """Give up every request, and count steps and tickets from 0 again."""
        self.drop()
        self.admissions = Admissions(*self._most)

    def _so_far(self, ticket: int) -> Segment | None:
        """The tokens that the steps have sampled of a request that is not finished; None if there are none."""
        return None

    @abstractmethod
    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        """Take a request into the batch of the next step."""

    @abstractmethod
    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        """Make a step, or a part of one; returns what it has finished, and True at the step's end."""


class OneByOneSampler(SteppingSampler):
    """A sampler of which a step samples each request of its batch to the end, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._batch: deque[tuple[int, SamplingRequest]] = deque()

    def drop(self) -> None:
        super().drop()
        self._batch.clear()

    def stop_after(self, engine_steps: int, groups: int) -> None:
        raise AssertionError("this sampler samples each request to its end")

    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        self._batch.append((ticket, request))

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        ticket, request = self._batch.popleft()
        return [(ticket, self._group(request))], not self._batch

    @abstractmethod
    def _group(self, request: SamplingRequest) -> RolloutGroup:
        """The request's completions."""


def _new_tokens(request: SamplingRequest) -> int:
    """Tokens that a sampler has not read in an earlier turn of the episode."""
    return len(request.segments[-1].token_ids if request.segments else request.prompt.token_ids)


def turn_ids(request: SamplingRequest, sampled: IntArray) -> IntArray:
    """All tokens of a turn, of which the request has the first ones if it was cut before."""
    before = list(takewhile(lambda segment: segment.by_policy, reversed(request.segments)))
    return np.concatenate([*(segment.token_ids for segment in reversed(before)), sampled]) if before else sampled


def continued(request: SamplingRequest, index: int, new: Segment, **facts: Any) -> Rollout:
    """A request's rollout of which a sampler has sampled the last segment.

    Args:
        facts: Further fields of the rollout, which describe that segment.
    """
    if request.answered_after is not None:
        new = replace(new, finish_reason=facts["finish_reason"])
    if request.goes_on or request.answered_after is not None:
        new = replace(new, weight_version=facts["weight_version"], continues=request.goes_on)
    return Rollout(prompt=request.prompt, segments=(*request.segments, new), index=index, **facts)


def going_on(request: SamplingRequest, sampled: Segment | None) -> SamplingRequest:
    """The request that goes on after what was sampled of it; the same if that is nothing."""
    if sampled is None:
        return request
    segments = (*request.segments, replace(sampled, continues=request.goes_on))
    return replace(request, segments=segments, max_new_tokens=request.max_new_tokens - len(sampled.token_ids))
