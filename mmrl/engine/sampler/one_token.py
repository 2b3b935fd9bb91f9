"""Requests of one token, by which a sampler scores tokens that are there already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmrl.engine_api import SamplingRequest
from mmrl.types import Sample, Segment


def one_token_requests(sample: Sample, temperature: float) -> Iterator[tuple[int, SamplingRequest]]:
    """For each token of a completion that the policy wrote, its place and a request that goes on just before it."""
    place = 0
    for number, segment in enumerate(sample.segments):
        for length in range(len(segment.token_ids) if segment.by_policy else 0):
            head = Segment(segment.token_ids[:length], True, np.zeros(length, np.float32))
            before = (*sample.segments[:number], *([head] if length else []))
            yield place + length, SamplingRequest(sample.prompt, 1, temperature, 1, 0, before)
        place += len(segment.token_ids)
