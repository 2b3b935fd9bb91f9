"""Lists and groups that travel between driver and ranks as a few arrays, and not object by object.

Each class here is the list, or the group, that it is made of. Only pickle sees a difference: the arrays of all its
members are joined, one array for each kind, and a prompt is there once for all of its samples. The other end gets plain
records of ``mmrl.types`` whose arrays are views, read-only ones where pickle's buffers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mmrl.engine_api import Cut, SamplingRequest
from mmrl.ops.packing import offsets
from mmrl.types import (
    EncodedPrompt,
    FloatArray,
    GroupKey,
    ImageRef,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    Segment,
    TrainingRow,
)

Array = npt.NDArray[Any]


class PackedArrays(list[FloatArray]):
    """Arrays of one value a token."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _split, _joined(self)


class PackedRequests(list[SamplingRequest]):
    """Requests to sample."""

    def __reduce__(self) -> tuple[Any, ...]:
        scalars = [(each.num_samples, each.temperature, each.max_new_tokens, each.seed) for each in self]
        segments = _pack_segments(each.segments for each in self) if any(each.segments for each in self) else None
        ends = [(each.answered_after, each.may_be_cut) for each in self]
        return _requests, (*_pack_prompts(each.prompt for each in self), scalars, segments, ends)


class PackedSamples(list[Sample]):
    """Samples; a rollout arrives as the sample that it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _samples, _pack_samples(self)


class PackedRows(list[TrainingRow]):
    """Rows of an optimizer step; all have the same columns, which arrive as float32, as the loss takes them."""

    def __reduce__(self) -> tuple[Any, ...]:
        names = self[0].columns if self else ()
        return _rows, (
            _pack_samples([row.sample for row in self]),
            [(r.weight, r.constants, r.views, r.group, r.score, r.whole_group, r.given) for r in self],
            _joined([row.mask for row in self]),
            {name: _joined([row.columns[name] for row in self], np.float32) for name in names},
        )


class PackedGroup(RolloutGroup):
    """A group as a rank has sampled it. Its prompt arrives as key alone, and of each rollout's segments the last, which
    is new: the driver has the rest."""

    def __reduce__(self) -> tuple[Any, ...]:
        scalars = [
            (each.index, each.text, each.finish_reason, each.weight_version, each.greedy) for each in self.rollouts
        ]
        segments = _pack_segments(each.segments[-1:] for each in self.rollouts)
        return _group, (self.prompt.key, segments, scalars, _pack_optional([each.experts for each in self.rollouts]))


class PackedCuts(list[Cut]):
    """Cut requests as a rank knows them. Each arrives with its prompt as key alone, the tokens that it has left, and of
    its segments the last, which is new if fewer tokens are left than were asked for: the driver has the rest."""

    def __reduce__(self) -> tuple[Any, ...]:
        requests = [each.request for each in self]
        scalars = [(each.ticket, each.request.prompt.key, each.request.max_new_tokens) for each in self]
        return _cuts, (scalars, _pack_segments(each.segments[-1:] for each in requests))


def _requests(
    prompts: Any, places: Sequence[int], scalars: Sequence[Any], segments: Any, ends: Sequence[tuple[int | None, bool]]
) -> list[SamplingRequest]:
    known = _prompts(*prompts)
    of_requests = [()] * len(places) if segments is None else _segments(*segments)
    parts = zip(places, scalars, of_requests, ends, strict=True)
    return [
        SamplingRequest(known[place], num_samples, temperature, max_new_tokens, seed, own, *end)
        for place, (num_samples, temperature, max_new_tokens, seed), own, end in parts
    ]


def _rows(samples: Any, scalars: Sequence[Any], masks: Any, columns: Mapping[str, Any]) -> list[TrainingRow]:
    split = {name: _split(*packed) for name, packed in columns.items()}
    parts = zip(_samples(*samples), scalars, _split(*masks), strict=True)
    return [
        TrainingRow(sample, weight, mask, {name: values[place] for name, values in split.items()}, *others)
        for place, (sample, (weight, *others), mask) in enumerate(parts)
    ]


def _cuts(scalars: Sequence[tuple[int, GroupKey, int]], segments: Any) -> list[Cut]:
    parts = zip(scalars, _segments(*segments), strict=True)
    return [Cut(ticket, SamplingRequest(_named(key), 1, 1.0, left, 0, own)) for (ticket, key, left), own in parts]


def _named(key: GroupKey) -> EncodedPrompt:
    """A prompt of which nothing but the key is known."""
    epoch, name = key
    return EncodedPrompt(prompt=Prompt(name, ()), text="", token_ids=np.zeros(0, np.int32), images=(), epoch=epoch)


def _group(key: GroupKey, segments: Any, scalars: Sequence[Any], experts: Any) -> RolloutGroup:
    prompt = _named(key)
    parts = zip(_segments(*segments), scalars, _optional(experts, len(scalars)), strict=True)
    return RolloutGroup(prompt, tuple(Rollout(prompt, own, *each, experts=known) for own, each, known in parts))


def _pack_samples(samples: Sequence[Sample]) -> tuple[Any, ...]:
    return (
        *_pack_prompts(sample.prompt for sample in samples),
        _pack_segments(sample.segments for sample in samples),
        _pack_optional([sample.experts for sample in samples]),
        [sample.view for sample in samples],
    )


def _samples(prompts: Any, places: Sequence[int], segments: Any, experts: Any, views: Sequence[str]) -> list[Sample]:
    known = _prompts(*prompts)
    parts = zip(places, _segments(*segments), _optional(experts, len(places)), views, strict=True)
    return [Sample(known[place], own, experts=chosen, view=view) for place, own, chosen, view in parts]


def _pack_prompts(prompts: Iterable[EncodedPrompt]) -> tuple[Any, list[int]]:
    """Each different object once, and the place of each prompt among them."""
    known: dict[EncodedPrompt, int] = {}
    places = [known.setdefault(prompt, len(known)) for prompt in prompts]
    parts = [(each.prompt, each.text, each.images, each.epoch, _pack_views(each)) for each in known]
    return (parts, *_joined([each.token_ids for each in known], np.int32)), places


def _pack_views(prompt: EncodedPrompt) -> list[tuple[str, tuple[ImageRef, ...], Array | None]]:
    """Each view's name and images, and its tokens if they are not the prompt's own."""
    return [
        (name, view.images, None if np.array_equal(view.token_ids, prompt.token_ids) else view.token_ids)
        for name, view in prompt.views.items()
    ]


def _prompts(parts: Sequence[Any], token_ids: Array, lengths: Sequence[int]) -> list[EncodedPrompt]:
    found = []
    for (prompt, text, images, epoch, views), ids in zip(parts, _split(token_ids, lengths), strict=True):
        plain = EncodedPrompt(prompt=prompt, text=text, token_ids=ids, images=images, epoch=epoch)
        seen = {
            name: replace(plain, images=own, token_ids=ids if others is None else others) for name, own, others in views
        }
        found.append(replace(plain, views=seen) if seen else plain)
    return found


def _pack_segments(of_samples: Iterable[Sequence[Segment]]) -> tuple[Any, ...]:
    of_samples = list(of_samples)
    segments = [segment for own in of_samples for segment in own]
    return (
        [len(own) for own in of_samples],
        [(each.by_policy, each.weight_version, each.role, each.finish_reason, each.continues) for each in segments],
        {place: segment.images for place, segment in enumerate(segments) if segment.images},
        _joined([segment.token_ids for segment in segments], np.int32),
        _joined([segment.sampler_logprobs for segment in segments], np.float32),
    )


def _segments(
    counts: Sequence[int], scalars: Sequence[Any], images: Any, token_ids: Any, logprobs: Any
) -> list[tuple[Segment, ...]]:
    parts = zip(scalars, _split(*token_ids), _split(*logprobs), strict=True)
    segments = [
        Segment(ids, by_policy, values, version, images.get(place, ()), *others)
        for place, ((by_policy, version, *others), ids, values) in enumerate(parts)
    ]
    return [tuple(segments[start:end]) for start, end in pairwise(offsets(counts))]


def _pack_optional(arrays: Sequence[Array | None]) -> tuple[Any, ...] | None:
    """None if every array is None; else those that are there, and which ones these are."""
    there = [array for array in arrays if array is not None]
    return ([array is not None for array in arrays], *_joined(there)) if there else None


def _optional(packed: Any, count: int) -> list[Array | None]:
    if packed is None:
        return [None] * count
    is_there, *joined = packed
    there = iter(_split(*joined))
    return [next(there) if each else None for each in is_there]


def _joined(arrays: Sequence[Array], dtype: Any = None) -> tuple[Array, list[int]]:
    """One array of all, and their lengths; in their own type if none is given."""
    values = np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype or np.float32)
    return values, [len(array) for array in arrays]


def _split(values: Array, lengths: Sequence[int]) -> list[Array]:
    """Views of the arrays that were joined."""
    return [values[start:end] for start, end in pairwise(offsets(lengths))]
