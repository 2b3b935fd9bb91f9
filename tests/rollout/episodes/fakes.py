"""A sampler and an encoder of letters: one token is one character, an image is four tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.data.images import MediaStore
from mmrl.engine_api import EAGER, Finished, Polled, SamplingRequest
from mmrl.types import IMAGE_PLACEHOLDER, Call, Content, EncodedPrompt, Prompt, Rollout, RolloutGroup, Segment

END, IMAGE_TOKENS = 0, [1, 1, 1, 1]


class AnySize:
    """A grid that leaves images as they are."""

    def size(self, width: int, height: int, *, where: str) -> tuple[int, int]:
        return width, height


def media(folder: Path) -> MediaStore:
    return MediaStore(folder, AnySize())


class LetterEncoder:
    def __init__(self, store: MediaStore) -> None:
        self.store = store

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        text = "".join(message.content for message in prompt.messages)
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        assert len(rest) == len(prompt.images)
        ids = [*map(ord, first), *(i for part in rest for i in (*IMAGE_TOKENS, *map(ord, part)))]
        images = tuple(map(self.store.add, prompt.images))
        return EncodedPrompt(prompt=prompt, text=text, token_ids=np.array(ids, np.int32), images=images)

    def calls(self, text: str) -> tuple[Call, ...]:
        return (Call(text[4:], {}),) if text.startswith("use ") else ()

    def insertion(self, turn: Segment, content: Content, role: str) -> Segment:
        ids = [] if turn.token_ids[-1] == END else [END]
        for part in content:
            ids += map(ord, part) if isinstance(part, str) else IMAGE_TOKENS
        ids.append(ord(">"))
        images = tuple(part for part in content if not isinstance(part, str))
        return Segment(np.array(ids, np.int32), False, np.zeros(len(ids), np.float32), images=images, role=role)


@dataclass
class _Running:
    ticket: int
    request: SamplingRequest
    began: int
    left: list[int]


@dataclass
class ScriptedSampler:
    """Writes what ``script(request)`` says, one character a step, and keeps all promises of ``Sampler``.

    Attributes:
        admitted: (step, ticket) of each admission, in order.
        requests: All of them, in the order of their admission.
    """

    script: Any
    step: int = 0
    admitted: list[tuple[int, int]] = field(default_factory=list)
    requests: list[SamplingRequest] = field(default_factory=list)
    dropped: int = 0
    _running: list[_Running] = field(default_factory=list)
    _due: dict[int, int] = field(default_factory=dict)
    _given: dict[int, SamplingRequest | None] = field(default_factory=dict)
    _count: int = 0
    _delays: dict[int, int] = field(default_factory=dict)

    def submit(self, requests: Sequence[SamplingRequest]) -> list[int]:
        tickets = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        for ticket, request in zip(tickets, requests, strict=True):
            self._admit(ticket, request)
        return tickets

    def answer(self, ticket: int, request: SamplingRequest | None) -> None:
        assert ticket in self._due and ticket not in self._given
        self._given[ticket] = request

    def drop(self) -> None:
        self.dropped += 1
        self._running, self._due, self._given = [], {}, {}

    def poll(self) -> Polled:
        while True:
            for ticket in sorted(self._due, key=lambda ticket: (self._due[ticket], ticket)):
                is_eager = self._delays[ticket] == EAGER
                if self._due[ticket] > self.step and not is_eager:
                    break
                if ticket not in self._given:
                    if is_eager:
                        continue
                    return Polled(waits=[ticket])
                del self._due[ticket]
                if (request := self._given.pop(ticket)) is not None:
                    self._admit(ticket, request)
            if not self._running:
                if not self._due or any(self._delays[ticket] == EAGER for ticket in self._due):
                    return Polled()
                self.step = min(self._due.values())
                continue
            self.step += 1
            if finished := [found for each in list(self._running) if (found := self._advance(each))]:
                return Polled(finished)

    def _admit(self, ticket: int, request: SamplingRequest) -> None:
        assert request.num_samples == 1 and request.max_new_tokens >= 1 and not request.prompt.prompt.images
        self.admitted.append((self.step, ticket))
        self.requests.append(request)
        self._delays[ticket] = request.answered_after
        ids = [*map(ord, self.script(request)), END][: request.max_new_tokens]
        self._running.append(_Running(ticket, request, self.step, ids))

    def _advance(self, each: _Running) -> Finished | None:
        done = self.step - each.began
        if done < len(each.left):
            return None
        self._running.remove(each)
        self._due[each.ticket] = self.step + self._delays[each.ticket]
        ids = np.array(each.left, np.int32)
        # What shares the batch shows in the numbers, as in bfloat16.
        logprobs = np.full(len(ids), -1.0 - 1e-3 * len(self._running) - 1e-6 * self.step, np.float32)
        segment = Segment(ids, True, logprobs, weight_version=1)
        text, stops = "".join(chr(i) for i in ids if i), END in ids
        segments = (*each.request.segments, segment)
        rollout = Rollout(each.request.prompt, segments, 0, text, "stop" if stops else "length", 1)
        return Finished(each.ticket, each.began, self.step, RolloutGroup(each.request.prompt, (rollout,)))


def without_clock(group: RolloutGroup) -> list[Any]:
    """All that must not depend on the clock, comparable."""
    return [
        (
            rollout.key, rollout.text, rollout.finish_reason, rollout.failure, dict(rollout.components),
            rollout.token_ids.tolist(), rollout.mask.tolist(), rollout.sampler_logprobs.tolist(),
            [replace(played, info=dict(played.info)) for played in rollout.episode], rollout.prompt.token_ids.tolist(),
        )
        for rollout in group.rollouts
    ]  # fmt: skip
