"""A sampler whose completions a function writes, at the steps of a real one: one token a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmrl.engine.sampler.admissions import SteppingSampler, continued, turn_ids
from mmrl.engine_api import SamplingRequest
from mmrl.types import Rollout, RolloutGroup, Segment

Write = Callable[[SamplingRequest], Sequence[int]]
"""The tokens that follow a request; its ``segments`` and its ``seed`` tell which turn of which member it is."""


class ScriptedSampler(SteppingSampler):
    """Implements ``engine_api.Sampler``. All members of a group are alike.

    Args:
        write: Token ids of each turn; a turn ends with ``stop`` unless it has ``max_new_tokens``.
        decode: The text of a turn's token ids.
        most: Most requests that begin at a step.

    Attributes:
        weight_version: That of all that is sampled from now on.
        requests: All that were admitted, in order.
        began: Ticket and step of each of them.
    """

    def __init__(
        self, write: Write, decode: Callable[[Any], str] = lambda ids: " ".join(map(str, ids)), most: int | None = None
    ) -> None:
        super().__init__(most)
        self._write, self._decode = write, decode
        self._left: dict[int, tuple[SamplingRequest, Sequence[int], int]] = {}
        self.weight_version = 0
        self.requests: list[SamplingRequest] = []
        self.began: list[tuple[int, int]] = []

    def drop(self) -> None:
        super().drop()
        self._left.clear()

    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        ids = self._write(request)[: request.max_new_tokens]
        self._left[ticket] = request, ids, len(ids)
        self.requests.append(request)
        self.began.append((ticket, self.admissions.step))

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        self._left = {ticket: (request, ids, left - 1) for ticket, (request, ids, left) in self._left.items()}
        done = [ticket for ticket, (_, _, left) in self._left.items() if left <= 0]
        return [(ticket, self._group(*self._left.pop(ticket)[:2])) for ticket in done], True

    def _so_far(self, ticket: int) -> Segment | None:
        _, ids, left = self._left.get(ticket, (None, (), 0))
        return self._segment(ids[: len(ids) - left], self.weight_version) if len(ids) > left else None

    def _segment(self, ids: Sequence[int], version: int | None = None) -> Segment:
        return Segment(np.array(ids, np.int32), True, np.full(len(ids), -0.5, np.float32), version)

    def _group(self, request: SamplingRequest, ids: Sequence[int]) -> RolloutGroup:
        return RolloutGroup(request.prompt, tuple(self._rollout(request, i, ids) for i in range(request.num_samples)))

    def _rollout(self, request: SamplingRequest, index: int, ids: Sequence[int]) -> Rollout:
        segment = self._segment(ids)
        reason = "length" if len(ids) == request.max_new_tokens else "stop"
        facts: dict[str, Any] = {"finish_reason": reason, "weight_version": self.weight_version}
        return continued(request, index, segment, text=self._decode(turn_ids(request, segment.token_ids)), **facts)
