"""Writes a step's rollouts in columns; ``schema.py`` names them."""

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

from mmrl.rollout.records.columns import escaped
from mmrl.rollout.records.episodes import episode_fields, image_record, segment_records, view_records
from mmrl.rollout.records.lines import plain_columns
from mmrl.rollout.records.schema import AS_JSON, BY_BYTE, SCHEMA, group_schema, listed
from mmrl.system.redaction import Redactor
from mmrl.token_columns import COLUMNS, CRITIC, MISMATCHED_COLUMNS, VIEW_COLUMNS, TokenColumn
from mmrl.types import CreditedGroup, PreUpdateStatistics, Prompt, Rollout, ScoredGroup, Segment

ROW_GROUP_TOKENS = 2**18
"""Tokens after which a row group ends: a reader holds one at a time, some 5 MB."""


def write_groups(file: BinaryIO, groups: Iterable[CreditedGroup], state: Mapping[str, Any], redact: Redactor) -> None:
    """Write the groups of a step.

    Args:
        state: The algorithm's state before the step.
        redact: Applied to every text.
    """
    text, groups = _Text(redact), list(groups)
    schema = group_schema(
        views=any(group.scored.group.prompt.views for group in groups),
        mismatched=any(group.mismatched_logprobs for group in groups),
        scores=any(len(group.final_values) and not len(group.values) for group in groups),
        critic=any(len(group.values) for group in groups),
        continues=any(segment.continues for group in groups for segment in _segments(group)),
        branches=any(rollout.branch is not None for group in groups for rollout in group.scored.rollouts),
        spans=any(group.scored.token_rewards for group in groups),
        recalled=any(rollout.recalled for group in groups for rollout in group.scored.rollouts),
        retried=any(group.scored.group.prompt.prompt.retries for group in groups),
    )
    metadata = {"schema": str(SCHEMA), "algorithm_state": text.json(state)}
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=False,
        column_encoding=dict.fromkeys(BY_BYTE, "BYTE_STREAM_SPLIT"),
        # Each file has 81 columns. Nothing reads their least and greatest values, and Parquet's own schema tells the
        # same types as a copy in Arrow's form.
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.add_key_value_metadata(metadata)
        for part in _parts(groups):
            writer.write_batch(_batch(part, text, schema))


def _segments(group: CreditedGroup) -> Iterator[Segment]:
    return (segment for rollout in group.scored.rollouts for segment in rollout.segments)


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

    def within(self, value: Any) -> Any:
        """A value of lists and objects with all of its texts so; fields that are JSON in their columns become that."""
        match value:
            case str():
                return self(value)
            case list():
                return [self.within(each) for each in value]
            case dict():
                items = value.items()
                return {
                    name: self.json(each) if name in AS_JSON and each is not None else self.within(each)
                    for name, each in items
                }
            case _:
                return value


def _batch(part: Sequence[tuple[int, CreditedGroup]], text: _Text, schema: pa.Schema) -> pa.RecordBatch:
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
        "images": [text.within(list(map(image_record, prompt.images))) for prompt in prompts],
        "answer": [text.json(prompt.prompt.answer) for prompt in prompts],
        "choices": [[text(choice) for choice in prompt.prompt.choices] for prompt in prompts],
        "columns": [text.json(plain) for plain, _ in columns],
        "columns_as_text": [[(text(name), text(value)) for name, value in others.items()] for _, others in columns],
        "demonstration": [text(prompt.prompt.demonstration) for prompt in prompts],
        "candidates": [_candidates(prompt.prompt, text) for prompt in prompts],
        "views": [text.within(view_records(prompt)) for prompt in prompts],
        "retries": [prompt.prompt.retries or None for prompt in prompts],
        "rollouts": pa.ListArray.from_arrays(
            _offsets(len(each) for each in members),
            _rollouts(
                [member for each in members for member in each],
                text,
                schema.field("rollouts").type.value_type,
            ),
        ),
    }
    return pa.record_batch([_array(found[field.name], field.type) for field in schema], schema=schema)


def _candidates(prompt: Prompt, text: _Text) -> list[dict[str, Any]] | None:
    return [{"text": text(each.text), "score": each.score} for each in prompt.candidates] or None


@dataclass(frozen=True, slots=True)
class _Member:
    """A rollout of a group with its numbers.

    Attributes:
        place: Its place in ``scored``.
        credited: The group with the step's results; None for a greedy rollout, which has none.
    """

    scored: ScoredGroup
    place: int
    credited: CreditedGroup | None = None

    @property
    def rollout(self) -> Rollout:
        return self.scored.rollouts[self.place]

    @property
    def updates(self) -> Sequence[PreUpdateStatistics]:
        return self.credited.updates[self.place] if self.credited and self.credited.updates else ()

    @property
    def critic_updates(self) -> Sequence[PreUpdateStatistics]:
        return self.credited.critic_updates[self.place] if self.credited and self.credited.critic_updates else ()

    def values(self, column: TokenColumn) -> Any:
        """(T,) numbers of a token column, or for each optimizer step (T,); None where there are none."""
        if column.known == "sampled":
            return getattr(self.rollout, column.name)
        if column.is_per_update:
            updates = self.critic_updates if column.role == CRITIC else self.updates
            return [getattr(each, column.name) for each in updates]
        of_group = () if self.credited is None else getattr(self.credited, column.credited)
        if len(of_group):
            return of_group[self.place]
        return None if column.may_lack else ()

    @property
    def final_value(self) -> float | None:
        """A reward model's score, or a critic's value; None where there is none."""
        of_group = () if self.credited is None else self.credited.final_values
        return _known(of_group[self.place]) if len(of_group) else None

    @property
    def token_rewards(self) -> Any:
        """(T,) values of parts of its text; None where nobody asked for them."""
        return self.scored.token_rewards[self.place] if self.scored.token_rewards else None

    def mismatched(self, column: TokenColumn) -> Any:
        """(T_j,) numbers of its prompt with another row's completion; None where nobody asked for them."""
        of_group = () if self.credited is None else getattr(self.credited, column.mismatched)
        return of_group[self.place] if len(of_group) else None


def _members(group: CreditedGroup) -> Iterator[_Member]:
    """The rollouts of a group, the greedy one last."""
    for place in range(len(group.scored.rollouts)):
        yield _Member(group.scored, place, group)
    if group.scored.greedy is not None:
        yield _Member(group.scored.greedy, 0)


def _rollouts(members: Sequence[_Member], text: _Text, kind: pa.StructType) -> pa.StructArray:
    rollouts = [member.rollout for member in members]
    found: dict[str, Any] = {
        "index": [rollout.index for rollout in rollouts],
        "greedy": [member.credited is None for member in members],
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
        "segments": [text.within(segment_records(rollout.segments)) for rollout in rollouts],
    }
    for column in COLUMNS:
        found |= _token_column(column, members)
    fields = [episode_fields(rollout) for rollout in rollouts]
    found |= {
        "turns": [rollout.turn_of_token if rollout.episode else None for rollout in rollouts],
        "turn_rewards": [[turn.reward for turn in rollout.episode] or None for rollout in rollouts],
        "episode": [text.within(each.get("episode")) for each in fields],
        "components": [
            [(text(name), value) for name, value in each["components"].items()] if "components" in each else None
            for each in fields
        ],
        "failure": [text(each.get("failure")) for each in fields],
        "recalled": [rollout.recalled or None for rollout in rollouts],
        "branch": [each.get("branch") for each in fields],
        "final_value": [member.final_value for member in members],
        "update_final_values": [[each.final_value for each in member.updates] for member in members],
    }
    if kind.get_field_index("view") >= 0:
        found["view"] = [rollout.view or None for rollout in rollouts]
        found |= {column.record: [_of_views(member, column) for member in members] for column in VIEW_COLUMNS}
    for column in MISMATCHED_COLUMNS if kind.get_field_index(MISMATCHED_COLUMNS[0].mismatched_record) >= 0 else ():
        found[column.mismatched_record] = _lists([member.mismatched(column) for member in members], column.dtype)
    if kind.get_field_index("token_rewards") >= 0:
        found["token_rewards"] = _lists([member.token_rewards for member in members], np.float64)
    arrays = [_array(found.get(field.name, [None] * len(members)), field.type) for field in kind]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _of_views(member: _Member, column: TokenColumn) -> list[tuple[str, list[Any]]] | None:
    """By view, the numbers of each optimizer step that took the rollout in; None where there are none."""
    names = dict.fromkeys(name for update in member.updates for name in update.views)
    nothing = np.zeros(0, np.float32)
    return [
        (name, [getattr(each.views[name], column.name) if name in each.views else nothing for each in member.updates])
        for name in names
    ] or None


def _token_column(column: TokenColumn, members: Sequence[_Member]) -> dict[str, Any]:
    """The fields of a token column."""
    values = [member.values(column) for member in members]
    if column.known == "by credit":
        ones = [_one(each, len(member.rollout.token_ids)) for each, member in zip(values, members, strict=True)]
        lists = [each if one is None else None for each, one in zip(values, ones, strict=True)]
        return {column.record: ones, listed(column): _lists(lists, column.dtype)}
    if not column.is_per_update:
        return {column.record: _lists(values, column.dtype)}
    if column.name == "logprobs":
        values = [[] if _is_repeated(member) else each for each, member in zip(values, members, strict=True)]
    return {column.record: _lists_of_lists(values, column.dtype)}


def _one(values: Any, length: int) -> float | None:
    """The number of all tokens, bit by bit; None if there is none, or more than one."""
    bits = np.asarray(() if values is None else values, np.float64).view(np.int64)
    return float(values[0]) if len(bits) == length > 0 and (bits == bits[0]).all() else None


def _is_repeated(member: _Member) -> bool:
    """True if the one optimizer step began from the learner's log-probs before it, bit by bit.

    Records then have them once.
    """
    if member.credited is None or len(member.updates) != 1:
        return False
    found = (member.updates[0].logprobs, member.credited.logprobs[member.place])
    one, other = (np.asarray(each, np.float32) for each in found)
    return np.array_equal(one.view(np.int32), other.view(np.int32))


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


def _lists_of_lists(arrays: Sequence[Sequence[Any]], dtype: npt.DTypeLike) -> pa.ListArray:
    inner = _lists([each for some in arrays for each in some], dtype)
    return pa.ListArray.from_arrays(_offsets(map(len, arrays)), inner)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(list(accumulate(lengths, initial=0)), pa.int32())
