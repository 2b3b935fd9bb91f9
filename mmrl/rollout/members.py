"""The members of groups that are sampled in parts: each is a request of its own, which goes on in later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from mmrl.data.order import part_seed
from mmrl.engine_api import Sampler, SamplingRequest
from mmrl.rollout.unfinished import UnfinishedGroup
from mmrl.types import EncodedPrompt, GroupKey, Rollout, RolloutGroup


class Members(Protocol):
    """The members of all groups that a step has in flight; completions, or episodes."""

    def submit(self, groups: Sequence[UnfinishedGroup]) -> None:
        """Go on with groups, in this order; while the sampler makes no step."""
        ...

    def finished(self, engine_steps: int, groups: int) -> Iterator[RolloutGroup]:
        """Groups as they are finished, for at least so many engine steps and until there are so many groups."""
        ...

    def cut(self) -> list[UnfinishedGroup]:
        """Give up what the sampler has, after a stop; returns the groups that go on, in the order of submission."""
        ...

    def abandon(self) -> None:
        """Give up everything: a step fails, and takes its groups as they were before, or the run ends."""
        ...


class Completions(Members):
    """Completions; nobody answers them.

    Args:
        request_of: The request for the group of a prompt.
        count: Called with the tokens that were sampled.
    """

    def __init__(
        self, sampler: Sampler, request_of: Callable[[EncodedPrompt], SamplingRequest], count: Callable[[int], object]
    ) -> None:
        self._sampler, self._request_of, self._count = sampler, request_of, count
        self._groups: dict[GroupKey, UnfinishedGroup] = {}
        self._tickets: dict[int, Rollout] = {}

    def submit(self, groups: Sequence[UnfinishedGroup]) -> None:
        left = [
            rollout
            for group in groups
            for rollout, goes_on in zip(group.group.rollouts, group.goes_on, strict=True)
            if goes_on
        ]
        tickets = self._sampler.submit([self._request(rollout) for rollout in left])
        self._tickets |= zip(tickets, left, strict=True)
        self._groups |= {group.key: group for group in groups}

    def finished(self, engine_steps: int, groups: int) -> Iterator[RolloutGroup]:
        self._sampler.stop_after(engine_steps, groups)
        stopped = False
        while not stopped:
            polled = self._sampler.poll()
            for finished in polled.finished:
                (rollout,) = finished.group.rollouts
                key = self._take(finished.ticket, rollout, goes_on=False)
                if not any(self._groups[key].goes_on):
                    yield self._groups.pop(key).group
            stopped = polled.stopped

    def cut(self) -> list[UnfinishedGroup]:
        for cut in self._sampler.cut():
            before = self._tickets[cut.ticket]
            self._take(cut.ticket, replace(before, segments=cut.request.segments), goes_on=True)
        assert not self._tickets, "a request is neither finished nor cut"
        return list(self._groups.values())

    def abandon(self) -> None:
        self._sampler.drop()

    def _request(self, rollout: Rollout) -> SamplingRequest:
        """The request that goes on with a completion."""
        request, segments = self._request_of(rollout.prompt), rollout.segments
        return replace(
            request,
            num_samples=1,
            # One that is longer already began with another limit, in a run that this one was forked from.
            max_new_tokens=max(request.max_new_tokens - len(rollout.token_ids), 1),
            seed=part_seed(request.seed, rollout.index, rollout.prompt.id, len(segments))
            if segments
            else request.seed + rollout.index,
            segments=segments,
            may_be_cut=True,
        )

    def _take(self, ticket: int, rollout: Rollout, *, goes_on: bool) -> GroupKey:
        """Note a rollout as it is now; returns its group's key."""
        before = self._tickets.pop(ticket)
        group, index = self._groups[before.prompt.key], before.index
        self._count(len(rollout.token_ids) - len(before.token_ids))
        rollouts, going = list(group.group.rollouts), list(group.goes_on)
        rollouts[index], going[index] = replace(rollout, prompt=before.prompt, index=index), goes_on
        self._groups[group.key] = replace(
            group, group=RolloutGroup(group.group.prompt, tuple(rollouts)), goes_on=tuple(going)
        )
        return group.key
