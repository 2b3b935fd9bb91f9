"""Samplers of the fake engine's letters, which write a letter an engine step where rollouts are sampled in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmrl.engine.sampler.admissions import OneByOneSampler, SteppingSampler
from mmrl.engine_api import Cut, SamplingRequest
from mmrl.system import failpoints
from mmrl.types import RolloutGroup, Segment


class LetterSteps(OneByOneSampler):
    """A kind of ``OneByOneSampler`` whose steps are letters; to be the first base class."""

    stop_after = SteppingSampler.stop_after

    def __init__(self, *parts: Any) -> None:
        self._written: dict[int, tuple[RolloutGroup, int]] = {}  # with the letters so far
        super().__init__(*parts)

    def drop(self) -> None:
        super().drop()
        self._written.clear()

    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        self._written[ticket] = self._group(request), 0

    def cut(self) -> Sequence[Cut]:
        failpoints.reach("fake.cut")
        return super().cut()

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        failpoints.reach("fake.step")
        self._written = {ticket: (group, count + 1) for ticket, (group, count) in self._written.items()}
        done = [ticket for ticket, (group, count) in self._written.items() if count >= _longest(group)]
        return [(ticket, self._written.pop(ticket)[0]) for ticket in done], True

    def _so_far(self, ticket: int) -> Segment | None:
        group, count = self._written.get(ticket, (None, 0))
        if group is None or not count:
            return None
        (rollout,) = group.rollouts
        last = rollout.segments[-1]
        ids, logprobs = last.token_ids[:count], last.sampler_logprobs[:count]
        return replace(
            last, token_ids=ids, sampler_logprobs=logprobs, weight_version=rollout.weight_version, finish_reason=None
        )


def _longest(group: RolloutGroup) -> int:
    return max(len(rollout.segments[-1].token_ids) for rollout in group.rollouts)
