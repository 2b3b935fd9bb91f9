"""Writes a step's rollouts in columns; ``columns.py`` has the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mmrl.rollout.records.columns import BY_BYTE, GROUP, ROLLOUT, SCHEMA, escaped
from mmrl.rollout.records.episodes import episode_fields, image_record, segment_records
from mmrl.rollout.records.lines import plain_columns
from mmrl.system.redaction import Redactor
from mmrl.types import CreditedGroup, FloatArray, PreUpdateStatistics, Prompt, Rollout, ScoredGroup, Segment

ROW_GROUP_TOKENS = 2**18
"""Tokens after which a row group ends: a reader holds one at a time, some 5 MB."""


def write_groups(file: BinaryIO, groups: Iterable[CreditedGroup], state: Mapping[str, Any], redact: Redactor) -> None:
    """Write the groups of a step.

    Args:
        state: The algorithm's state before the step.
        redact: Applied to every text.
    """
    text = _Text(redact)
    metadata = {"schema": str(SCHEMA), "algorithm_state": text.json(state)}
    with pq.ParquetWriter(
        file,
        GROUP.with_metadata(metadata),
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(BY_BYTE, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    ) as writer:
        for part in _parts(groups):
            writer.write_batch(_batch(part, text))


def _parts(groups: Iterable[CreditedGroup]) -> Iterator[list[tuple[int, CreditedGroup]]]:
    """The groups with their numbers, in parts of one row group each."""
    part, tokens = list[tuple[int, CreditedGroup]](), 0
    for index, group in enumerate(groups):
        part.append((index, group))
        rollouts = group.scored.rollouts
        tokens += len(group.scored.group.prompt.token_ids) + sum(len(rollout.token_ids) for rollout in rollouts)
        if tokens >= ROW_GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


@dataclass(frozen=True)
class _Text:
    """Texts without secrets, as a column of UTF-8 can hold them; also what a loader gave instead of texts."""

    redact: Redactor

    def __call__(self, text: Any) -> str | None:
        if text is None:
            return None
        return escaped(self.redact(text if isinstance(text, str) else str(text)))

    def json(self, value: Any) -> str:
        return json.dumps(self.redact.plain(value))


def _batch(part: Sequence[tuple[int, CreditedGroup]], text: _Text) -> pa.RecordBatch:
    groups = [group for _, group in part]
    prompts = [group.scored.group.prompt for group in groups]
    places = [group.scored.place or (None, None) for group in groups]
    members = [list(_members(group)) for group in groups]
    columns = [plain_columns(prompt.prompt.columns) for prompt in prompts]
    found = {
        "group": [index for index, _ in part],
        "epoch": [prompt.epoch for prompt in prompts],
        "prompt_id": [text(prompt.id) for prompt in prompts],
        "source": [text(prompt.prompt.source) for prompt in prompts],
        "round": [place[0] for place in places],
        "place": [place[1] for place in places],
        "kept": [group.scored.kept for group in groups],
        "trained": [group.trained for group in groups],
        "messages": [
            [{"role": text(each.role), "content": text(each.content)} for each in prompt.prompt.messages]
            for prompt in prompts
        ],
        "prompt": [text(prompt.text) for prompt in prompts],
        "prompt_token_ids": _lists([prompt.token_ids for prompt in prompts], np.int32),
        "images": [_images([image_record(each) for each in prompt.images], text) for prompt in prompts],
        "answer": [text.json(prompt.prompt.answer) for prompt in prompts],
        "choices": [[text(choice) for choice in prompt.prompt.choices] for prompt in prompts],
        "columns": [text.json(plain) for plain, _ in columns],
        "columns_as_text": [[(text(name), text(value)) for name, value in others.items()] for _, others in columns],
        "demonstration": [text(prompt.prompt.demonstration) for prompt in prompts],
        "candidates": [_candidates(prompt.prompt, text) for prompt in prompts],
        "rollouts": pa.ListArray.from_arrays(
            _offsets(len(each) for each in members), _rollouts([member for each in members for member in each], text)
        ),
    }
    return pa.record_batch([_array(found[field.name], field.type) for field in GROUP], schema=GROUP)


def _candidates(prompt: Prompt, text: _Text) -> list[dict[str, Any]] | None:
    return [{"text": text(each.text), "score": each.score} for each in prompt.candidates] or None


@dataclass(frozen=True, slots=True)
class _Member:
    """A rollout of a group with its numbers; those of a greedy one are all empty.

    Attributes:
        place: Its place in ``scored``.
    """

    scored: ScoredGroup
    place: int
    greedy: bool = False
    advantages: FloatArray | Sequence[float] = ()
    logprobs: FloatArray | Sequence[float] = ()
    reference: FloatArray | None = None
    updates: Sequence[PreUpdateStatistics] = ()

    @property
    def rollout(self) -> Rollout:
        return self.scored.rollouts[self.place]


def _members(group: CreditedGroup) -> Iterator[_Member]:
    """The rollouts of a group, the greedy one last."""
    for i in range(len(group.scored.rollouts)):
        reference = group.reference_logprobs[i] if group.reference_logprobs else None
        updates = group.updates[i] if group.updates else ()
        yield _Member(group.scored, i, False, group.advantages[i], group.logprobs[i], reference, updates)
    if group.scored.greedy is not None:
        yield _Member(group.scored.greedy, 0, True)


def _rollouts(members: Sequence[_Member], text: _Text) -> pa.StructArray:
    rollouts = [member.rollout for member in members]
    advantages = [_advantages(member) for member in members]
    updates = [[] if _is_repeated(member) else [each.logprobs for each in member.updates] for member in members]
    found: dict[str, Any] = {
        "index": [rollout.index for rollout in rollouts],
        "greedy": [member.greedy for member in members],
        "completion": [text(rollout.text) for rollout in rollouts],
        "finish_reason": [text(rollout.finish_reason) for rollout in rollouts],
        "weight_version": [rollout.weight_version for rollout in rollouts],
        "reward": np.array([member.scored.rewards[member.place] for member in members], np.float64),
        "rewards": [
            [(text(name), _known(values[each.place])) for name, values in each.scored.components.items()]
            for each in members
        ],
        "answers": [
            [(text(name), text(answers[each.place])) for name, answers in each.scored.answers.items()]
            for each in members
        ],
        "valid": [bool(member.scored.valid[member.place]) for member in members],
        "token_ids": _lists([rollout.token_ids for rollout in rollouts], np.int32),
        "mask": _lists([rollout.mask for rollout in rollouts], np.bool_),
        "segments": [_segments(rollout.segments, text) for rollout in rollouts],
        "advantage": [value for value, _ in advantages],
        "advantages": _lists([each for _, each in advantages], np.float64),
        "sampler_logprobs": _lists([rollout.sampler_logprobs for rollout in rollouts], np.float32),
        "learner_logprobs": _lists([member.logprobs for member in members], np.float32),
        "reference_logprobs": _lists([member.reference for member in members], np.float32),
        "update_logprobs": _lists_of_lists(updates),
        "update_entropy": _lists_of_lists([[each.entropy for each in member.updates] for member in members]),
    }
    fields = [episode_fields(rollout) for rollout in rollouts]
    found |= {
        "turns": [rollout.turn_of_token if rollout.episode else None for rollout in rollouts],
        "turn_rewards": [[turn.reward for turn in rollout.episode] or None for rollout in rollouts],
        "episode": [_turns(each["episode"], text) if "episode" in each else None for each in fields],
        "components": [
            [(text(name), value) for name, value in each["components"].items()] if "components" in each else None
            for each in fields
        ],
        "failure": [text(each.get("failure")) for each in fields],
    }
    arrays = [_array(found.get(field.name, [None] * len(members)), field.type) for field in ROLLOUT]
    return pa.StructArray.from_arrays(arrays, fields=list(ROLLOUT))


def _advantages(member: _Member) -> tuple[float | None, FloatArray | None]:
    """The advantage of all tokens, or those of each."""
    values = np.asarray(member.advantages, np.float64)
    bits = values.view(np.int64)
    is_one = len(values) == len(member.rollout.token_ids) and len(values) > 0 and bool((bits == bits[0]).all())
    return (float(values[0]), None) if is_one else (None, values)


def _is_repeated(member: _Member) -> bool:
    """True if the one optimizer step began from the learner's log-probs, bit by bit."""
    if len(member.updates) != 1:
        return False
    one, other = (np.asarray(each, np.float32) for each in (member.updates[0].logprobs, member.logprobs))
    return np.array_equal(one.view(np.int32), other.view(np.int32))


def _segments(segments: Sequence[Segment], text: _Text) -> list[dict[str, Any]] | None:
    found = segment_records(segments)
    return found and [
        {
            **each,
            "images": _images(each["images"], text),
            "role": text(each["role"]),
            "finish_reason": text(each["finish_reason"]),
        }
        for each in found
    ]


def _turns(turns: Sequence[Mapping[str, Any]], text: _Text) -> list[dict[str, Any]]:
    return [
        {
            **each,
            "text": text(each["text"]),
            "calls": [
                {
                    "name": text(call["name"]),
                    "arguments": None if call["arguments"] is None else text.json(call["arguments"]),
                    "error": text(call["error"]),
                }
                for call in each["calls"]
            ],
            "finish_reason": text(each["finish_reason"]),
            "content": None if each["content"] is None else [_part(part, text) for part in each["content"]],
            "role": text(each["role"]),
            "info": text.json(each["info"]),
        }
        for each in turns
    ]


def _part(part: Mapping[str, Any], text: _Text) -> dict[str, Any]:
    return {"image": _images([part["image"]], text)[0]} if "image" in part else {"text": text(part["text"])}


def _images(images: Sequence[Mapping[str, Any]], text: _Text) -> list[dict[str, Any]]:
    return [{**each, "hash": text(each["hash"])} for each in images]


def _known(value: Any) -> float | None:
    """A component's value; None where it was not scored."""
    return None if np.isnan(value) else float(value)


def _array(values: Any, type_: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type_)


def _lists(arrays: Sequence[Any], dtype: npt.DTypeLike) -> pa.ListArray:
    """Lists of numbers; None is null."""
    known = [np.zeros(0, dtype), *(np.asarray(each, dtype) for each in arrays if each is not None)]
    nulls = [each is None for each in arrays]
    offsets = _offsets(0 if each is None else len(each) for each in arrays)
    return pa.ListArray.from_arrays(
        offsets, pa.array(np.concatenate(known)), mask=pa.array(nulls) if any(nulls) else None
    )


def _lists_of_lists(arrays: Sequence[Sequence[FloatArray]]) -> pa.ListArray:
    inner = _lists([each for some in arrays for each in some], np.float32)
    return pa.ListArray.from_arrays(_offsets(map(len, arrays)), inner)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(list(accumulate(lengths, initial=0)), pa.int32())
