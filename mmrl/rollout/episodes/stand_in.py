"""A sampler without a model: turns that are known beforehand, for the player of episodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from mmrl.engine_api import Finished, Polled, Sampler, SamplingRequest
from mmrl.types import Rollout, RolloutGroup


class StandInSampler(Sampler):
    """Gives each request one turn, at once; tickets count the submitted requests from 0."""

    def __init__(self) -> None:
        self._requests = dict[int, SamplingRequest]()
        self._unanswered = set[int]()

    @abstractmethod
    def turn(self, ticket: int, request: SamplingRequest) -> tuple[Rollout, int, int]:
        """The rollout that ends with the next turn of an episode, and the steps at which it began and finished."""

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        self._requests = dict(enumerate(requests))
        return list(self._requests)

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        self._unanswered.discard(ticket)
        if request is not None:
            self._requests[ticket] = request

    def poll(self) -> Polled:
        finished = [self._finished(ticket, request) for ticket, request in self._requests.items()]
        self._requests = {}
        self._unanswered |= {each.ticket for each in finished}
        return Polled(finished, () if finished else sorted(self._unanswered))

    def drop(self) -> None:
        self._requests, self._unanswered = {}, set()

    def _finished(self, ticket: int, request: SamplingRequest) -> Finished:
        rollout, began, step = self.turn(ticket, request)
        return Finished(ticket, began, step, RolloutGroup(request.prompt, (rollout,)))
