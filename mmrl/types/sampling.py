"""The requests to a sampler, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.types.arrays import IntArray
from mmrl.types.prompt import EncodedPrompt, ImageRef
from mmrl.types.rollout import RolloutGroup, Sample, Segment

EAGER = 0
"""``SamplingRequest.answered_after`` of a request whose answer is admitted as soon as it is there."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A group, or the next turn of one episode, to sample.

    Attributes:
        prompt: The prompt to continue.
        num_samples: Completions wanted; 1 for an episode.
        temperature: 0 is greedy.
        max_new_tokens: Limit per completion, the end-of-sequence token included.
        seed: The first member's seed; member ``i`` uses ``seed + i``.
        segments: Segments that follow the prompt already: an episode's turns and what was inserted between them.
        answered_after: Engine steps after its end at which ``Sampler.answer`` is due; ``EAGER`` admits the answer as
            soon as it is there. None: the request ends here, and nobody answers.
        may_be_cut: True if ``Sampler.stop_after`` counts its group, and ``Sampler.cut`` may come before its end. It has
            one sample, and is sampled by the ranks that sample the others of its prompt.
    """

    prompt: EncodedPrompt
    num_samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    segments: tuple[Segment, ...] = ()
    answered_after: int | None = None
    may_be_cut: bool = False

    @property
    def goes_on(self) -> bool:
        """True if it goes on with a turn of which a part was sampled before."""
        return bool(self.segments) and self.segments[-1].by_policy

    @property
    def token_ids(self) -> IntArray:
        """(P + T,) int32 tokens to continue: the prompt's and the segments'."""
        parts = [self.prompt.token_ids, *(segment.token_ids for segment in self.segments)]
        return np.concatenate(parts) if self.segments else self.prompt.token_ids

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Images that are in the tokens, in order."""
        return Sample(self.prompt, self.segments).all_images


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is sampled to its end.

    Attributes:
        ticket: The name that ``Sampler.submit`` gave it.
        began: Engine step at which it was admitted; steps are counted for each copy of the sampler's weights, from 0
            where ``Engine.sampling`` is entered.
        step: Engine step at which it was finished.
        group: Its completions. Each one's segments are the request's and one more, which ``text``, ``finish_reason``
            and the segment's ``weight_version`` are about.
    """

    ticket: int
    began: int
    step: int
    group: RolloutGroup


@dataclass(frozen=True, slots=True)
class Polled:
    """News of a sampler.

    Attributes:
        finished: Requests that are finished, each told once.
        waits: Tickets of which an answer is missing and holds the sampler, or a part of its ranks, up.
        stopped: True from a stop on that ``Sampler.stop_after`` has asked for.
        over: Tickets that are over, each told once, of requests that may be cut: those that nobody answers when they
            are finished, others at the step at which their None is due. So it does not depend on when that is given.
    """

    finished: Sequence[Finished] = ()
    waits: Sequence[int] = ()
    stopped: bool = False
    over: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """A request that was given up before its end.

    Attributes:
        ticket: The name that ``Sampler.submit`` gave it.
        request: The request that goes on with it. Its last segment has what was sampled of the turn, and
            ``max_new_tokens`` is what the turn has left. If nothing was sampled, it is the request as it was. Its seed
            is still that of what was sampled.
    """

    ticket: int
    request: SamplingRequest
