"""Which requests a sampler admits at which of its steps, and samplers that go by it."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from mmrl.engine_api import EAGER, Finished, Polled, Sampler, SamplingRequest
from mmrl.types import Rollout, RolloutGroup, Segment


class Admissions:
    """Counts a sampler's steps, and decides at which of them each request is admitted.

    A request is due when it is submitted. The answer to one that finishes at step s is due at step s +
    ``answered_after``, or when it is given if that is ``EAGER``. What is due is admitted in the order of due step and
    ticket, before the step is made. No step is made while an answer is due and not given, also if it will be None. When
    nothing runs, the count jumps to the earliest step at which something is due. So the steps at which requests are
    admitted do not depend on when answers are given, except for ``EAGER`` ones.

    Args:
        most: Most requests that are admitted at a step; None for any number. What is left goes first at the next step.
        most_tokens: Fewer are admitted if they bring so many new tokens.

    Attributes:
        step: The number of the next step, or of the one under way.
        running: Tickets of the requests that are being sampled, each with the step at which it was admitted.
    """

    def __init__(self, most: int | None = None, most_tokens: int | None = None) -> None:
        self._most, self._most_tokens = most or inf, most_tokens or inf
        self.step = 0
        self.running: dict[int, int] = {}
        self._num_tickets = 0
        self._is_under_way = False
        self._requests: dict[int, SamplingRequest | None] = {}  # of the tickets that run or are ready
        self._ready: list[tuple[int, int]] = []  # a heap of due step and ticket: submitted, or answered
        self._owed: dict[int, int] = {}  # due step of each answer that is not given
        self._owed_eagerly: set[int] = set()

    def submit(self, requests: Sequence[SamplingRequest]) -> list[int]:
        """Tickets of new requests; they count from 0."""
        if not (self.running or self._owed or any(self._requests.values())):
            # All episodes are over. The count goes on to the step at which the last of their ends is due, as it would
            # have in a poll: whether there was one after the last answer depends on how long the tools took.
            self.admit()
        tickets = list(range(self._num_tickets, self._num_tickets + len(requests)))
        self._num_tickets += len(requests)
        for ticket, request in zip(tickets, requests, strict=True):
            self._make_ready(ticket, request, self.step)
        return tickets

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        """Take the answer to a finished request; None ends the episode."""
        assert ticket in self._owed or ticket in self._owed_eagerly, f"ticket {ticket} waits for no answer"
        self._owed_eagerly.discard(ticket)
        self._make_ready(ticket, request, self._owed.pop(ticket, self.step))

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
        """Requests that the next step begins with, each with its ticket; none while an answer is waited for."""
        admitted = list[tuple[int, SamplingRequest]]()
        while not self._is_under_way and not admitted:
            if not self.running and not self._owed_eagerly:
                due = [*(step for step, _ in self._ready[:1]), *self._owed.values()]
                self.step = max(self.step, min(due, default=0))
            if not self._ready or self._ready[0][0] > self.step or min(self._owed.values(), default=inf) <= self.step:
                break
            tokens = 0
            while self._ready and self._ready[0][0] <= self.step:
                if len(admitted) >= self._most or tokens >= self._most_tokens:
                    break
                _, ticket = heapq.heappop(self._ready)
                if (request := self._requests[ticket]) is None:
                    del self._requests[ticket]
                else:
                    admitted.append((ticket, request))
                    tokens += _new_tokens(request)
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
            assert request is not None
            if request.answered_after == EAGER:
                self._owed_eagerly.add(ticket)
            elif request.answered_after is not None:
                self._owed[ticket] = self.step + request.answered_after
        self._is_under_way = not ends_step
        self.step += ends_step
        return tuple(finished)

    def drop(self) -> None:
        """Forget all requests; steps and tickets count on."""
        for each in (self.running, self._requests, self._ready, self._owed, self._owed_eagerly):
            each.clear()
        self._is_under_way = False

    def _make_ready(self, ticket: int, request: SamplingRequest | None, due: int) -> None:
        self._requests[ticket] = request
        heapq.heappush(self._ready, (due, ticket))


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
            if waits := admissions.waits:
                return Polled(waits=waits)
            if not admissions.running:
                return Polled()
            groups, ends_step = self._advance()
            if (finished := admissions.finish(groups, ends_step=ends_step)) or admissions.owes_eagerly:
                return Polled(finished)

    def drop(self) -> None:
        self.admissions.drop()

    def leave(self) -> None:
        """Give up every request, and count steps and tickets from 0 again."""
        self.drop()
        self.admissions = Admissions(*self._most)

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


def continued(request: SamplingRequest, index: int, new: Segment, **facts: Any) -> Rollout:
    """A request's rollout of which a sampler has sampled the last segment.

    Args:
        facts: Further fields of the rollout, which describe that segment.
    """
    if request.answered_after is not None:
        new = replace(new, weight_version=facts["weight_version"], finish_reason=facts["finish_reason"])
    return Rollout(prompt=request.prompt, segments=(*request.segments, new), index=index, **facts)
