"""A step's rollouts in columns (schema 2): parquet with zstd, one row for each group, its rollouts a list of structs.

Numbers keep their bits: token ids are int32, log-probs, entropies and values float32, advantages and rewards float64.
Lists of numbers go from numpy to parquet and back as buffers. Texts are as they are; one that UTF-8 cannot hold (it
has a lone surrogate), or that begins with a NUL, is a NUL and its JSON. ``answer`` and ``columns`` are JSON. Columns
that nothing fills yet are null, so that files of later versions have the same columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mmrl.errors import DataError
from mmrl.rollout.records.pairs import own_sum
from mmrl.rollout.records.unknown import tell_unknown
from mmrl.token_columns import COLUMNS, CRITIC_COLUMNS, MISMATCHED_COLUMNS, VIEW_COLUMNS, TokenColumn

SCHEMA = 2
_ESCAPE = "\0"
_IDS, _FLOATS, _EXACT = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.float64())
_IMAGE = pa.struct({"hash": pa.string(), "width": pa.int32(), "height": pa.int32(), "file_size": _IDS})
"""``file_size`` is null where it is not known; files of older versions lack it."""
_IMAGES = pa.list_(_IMAGE)
_TURN = pa.struct(
    {
        "text": pa.string(),
        "calls": pa.list_(pa.struct({"name": pa.string(), "arguments": pa.string(), "error": pa.string()})),
        "finish_reason": pa.string(),
        "tokens_left": pa.int32(),
        "content": pa.list_(pa.struct({"text": pa.string(), "image": _IMAGE})),  # null if there was no answer
        "role": pa.string(),
        "reward": pa.float64(),
        "done": pa.bool_(),
        "info": pa.string(),
        "began": pa.int64(),
        "finished": pa.int64(),
    }
)


def listed(column: TokenColumn) -> str:
    """The field with one value for each token."""
    return f"{column.record}s" if column.known == "by credit" else column.record


def _fields_of(*columns: TokenColumn) -> dict[str, pa.DataType]:
    """The fields of columns; one number stands for a list of equal ones by credit."""
    fields: dict[str, pa.DataType] = {}
    for column in columns:
        values = pa.list_(number := pa.from_numpy_dtype(column.dtype))
        fields |= {column.record: number, listed(column): pa.list_(values) if column.is_per_update else values}
    return fields


ROLLOUT = pa.struct(
    {
        "index": pa.int32(),
        "greedy": pa.bool_(),
        "completion": pa.string(),
        "finish_reason": pa.string(),
        "weight_version": pa.int64(),
        "reward": pa.float64(),
        "rewards": pa.map_(pa.string(), pa.float64()),  # null where it was not scored
        "answers": pa.map_(pa.string(), pa.string()),
        "valid": pa.bool_(),
        "token_ids": _IDS,
        "mask": pa.list_(pa.bool_()),
        "segments": pa.list_(  # null where ``mask`` tells all
            pa.struct(
                {
                    "tokens": pa.int32(),
                    "by_policy": pa.bool_(),
                    "weight_version": pa.int64(),
                    "images": _IMAGES,
                    "role": pa.string(),
                    "finish_reason": pa.string(),
                }
            )
        ),
        **_fields_of(*(column for column in COLUMNS if column not in CRITIC_COLUMNS)),
        "turns": _IDS,  # of each token; null, as all of an episode, without an environment
        "turn_rewards": _EXACT,
        "final_value": pa.float32(),
        "episode": pa.list_(_TURN),
        "components": pa.map_(pa.string(), pa.float64()),
        "failure": pa.string(),
    }
)
GROUP = pa.schema(
    {
        "group": pa.int32(),
        "epoch": pa.int32(),
        "prompt_id": pa.string(),
        "source": pa.string(),
        "round": pa.int32(),  # null, as ``place``, if it was sampled in an earlier step
        "place": pa.int32(),
        "kept": pa.bool_(),
        "trained": pa.bool_(),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "prompt": pa.string(),
        "prompt_token_ids": _IDS,
        "images": _IMAGES,
        "answer": pa.string(),
        "choices": pa.list_(pa.string()),
        "columns": pa.string(),
        "columns_as_text": pa.map_(pa.string(), pa.string()),
        "demonstration": pa.string(),
        "candidates": pa.list_(pa.struct({"text": pa.string(), "score": pa.float64(), "images": _IMAGES})),
        "rollouts": pa.list_(ROLLOUT),
    }
)
_OF_VIEWS = {
    "view": pa.string(),  # null where it was sampled from the prompt itself
    **{column.record: pa.map_(pa.string(), pa.list_(_FLOATS)) for column in VIEW_COLUMNS},
}
_OF_SCORES = {"update_final_values": _FLOATS}
"""The field with a reward model's score before each optimizer step; ``final_value`` is the one before the first."""
_MISMATCHED = {column.mismatched_record: pa.list_(pa.from_numpy_dtype(column.dtype)) for column in MISMATCHED_COLUMNS}
"""Fields with a number for each token of another row's completion, given this row's prompt."""
_OF_CRITIC = _fields_of(*CRITIC_COLUMNS)


def group_schema(*, views: bool, mismatched: bool, scores: bool = False, critic: bool = False) -> pa.Schema:
    """The schema of a step's file; ``prompt_token_ids`` of a view are null where they are the prompt's.

    Args:
        views: True for prompts that have views.
        mismatched: True for rollouts whose prompts were given other rows' completions.
        scores: True for rollouts that a reward model has scored.
        critic: True for rollouts that a critic has learned from.
    """
    more = {
        **(_OF_VIEWS if views else {}),
        **(_MISMATCHED if mismatched else {}),
        **(_OF_SCORES if scores else {}),
        **(_OF_CRITIC if critic else {}),
    }
    rollout = pa.struct([*ROLLOUT, *(pa.field(name, kind) for name, kind in more.items())])
    view = pa.struct({"name": pa.string(), "images": _IMAGES, "prompt_token_ids": _IDS})
    fields = [field for field in GROUP if field.name != "rollouts"]
    fields += [pa.field("views", pa.list_(view))] if views else []
    return pa.schema([*fields, pa.field("rollouts", pa.list_(rollout))])


FIELDS = frozenset(
    (
        *GROUP.names,
        "views",
        *(each.name for each in ROLLOUT),
        *_OF_VIEWS,
        *_MISMATCHED,
        *_OF_SCORES,
        *_OF_CRITIC,
        *("algorithm_state", "failed", "values"),
    )
)
"""All fields of records, also of those in JSON; ``values`` is in older files, and null."""
EPISODE = ("episode", "components", "failure")
AS_JSON = ("answer", "columns", "arguments", "info")
"""Fields of rows, calls and turns that are JSON in their columns."""
_ABSENT = ("file_size", "text", "image")
"""Fields that an image, or a part of an observation, lacks where they are null."""
_OF_PROMPT = (
    "source",
    "messages",
    "prompt",
    "prompt_token_ids",
    "images",
    "answer",
    "choices",
    "columns",
    "columns_as_text",
    "demonstration",
)
_OF_ROLLOUT = (
    "completion",
    "token_ids",
    "mask",
    "segments",
    "finish_reason",
    "weight_version",
    "rewards",
    "reward",
    "answers",
    "valid",
    "greedy",
    *(column.record for column in sorted(COLUMNS, key=lambda column: column.known != "sampled")),
    *EPISODE,
    *_OF_VIEWS,
    *_MISMATCHED,
    "final_value",
    *_OF_SCORES,
)
"""Fields of a record in its order, those of the prompt and those of the rollout."""
_OF_SOME = ("segments", *EPISODE, *_OF_VIEWS, *_MISMATCHED, "final_value", *_OF_SCORES)
_OF_SOME += tuple(column.record for column in CRITIC_COLUMNS)
"""Fields that a record lacks where they are null."""
BY_BYTE = [
    f"rollouts.list.element.{each.record}{'.list.element' * (1 + each.is_per_update)}"
    for each in COLUMNS
    if each.dtype == "float32"
]
"""Columns that are split into their first, second, ... bytes before zstd sees them."""


def escaped(text: str) -> str:
    """The text as UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _ESCAPE + json.dumps(text)
    return _ESCAPE + json.dumps(text) if text.startswith(_ESCAPE) else text


def unescaped(text: str) -> Any:
    """The text that ``escaped`` was given."""
    return json.loads(text[1:]) if text.startswith(_ESCAPE) else text


def _read(value: Any) -> Any:
    """A value of a column, or a whole row, as records have it."""
    match value:
        case str():
            return unescaped(value)
        case list() | tuple():
            return [_read(each) for each in value]
        case dict():
            known = {name: each for name, each in value.items() if each is not None or name not in _ABSENT}
            return {
                name: json.loads(each) if name in AS_JSON and each is not None else _read(each)
                for name, each in known.items()
            }
        case _:
            return value


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """A record of each rollout, as ``lines.py`` has them but with arrays; the first one has the algorithm's state.

    A token column that the rollout or the file lacks is None. ``segments`` and ``candidates`` may be missing.

    Raises:
        DataError: The file is not of this schema.
        ValueError, OSError: It is damaged.
    """
    with opened(file) as parquet:
        first = _state(file, parquet.metadata.metadata or {})
        for index in range(parquet.num_row_groups):
            for record in table_records(parquet.read_row_group(index, use_threads=False)):
                yield {**record, **first}
                first = {}


@contextmanager
def opened(file: Path) -> Iterator[pq.ParquetFile]:
    """A file of this schema, open.

    Raises:
        DataError: It is of another one.
        ValueError, OSError: It is damaged.
    """
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            _state(file, parquet.metadata.metadata or {})
            schema = parquet.schema_arrow
            tell_unknown(
                (*schema.names, *(field.name for field in schema.field("rollouts").type.value_type)), FIELDS, file
            )
            yield parquet
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def known_part(record: Any, file: Path) -> Any:
    """A record of a file of JSON lines without fields that this version does not know, which are told."""
    if not isinstance(record, dict):
        return record
    tell_unknown(record, FIELDS, file)
    return {name: value for name, value in record.items() if name in FIELDS}


def _state(file: Path, metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    schema = metadata.get(b"schema", b"").decode()
    if not schema:
        what = "this is no record of rollouts: it has no schema in its metadata"
        raise DataError(what, where=str(file), remedy="give files that a run wrote")
    if schema != str(SCHEMA):
        what = f"another version of mmrl wrote this record: its schema is {schema}, and this mmrl reads {SCHEMA}"
        raise DataError(what, where=str(file), remedy="read it with the mmrl that wrote it, or a later one")
    state = json.loads(metadata[b"algorithm_state"])
    return {"algorithm_state": state} if state else {}


def row_of(table: pa.Table, row: int) -> pa.Table:
    """A copy of one row of a table, without the values of others that a slice would still hold."""
    rows = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(np.int64(row).tobytes())])  # imports no pandas
    return table.take(rows)


def table_records(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The records of a row group, or of a row of one."""
    groups = group_fields(table.drop_columns(["prompt_token_ids", "rollouts"]))
    prompts = _split(table["prompt_token_ids"].combine_chunks())
    rollouts = table["rollouts"].combine_chunks()
    members = rollouts.values
    fields: dict[str, Any] = {name: _split(members.field(name)) for name in ("token_ids", "mask")}
    fields |= {column.record: _token_column(members, column) for column in COLUMNS}
    known = {field.name for field in members.type}
    fields |= {name: _split(members.field(name)) for name in _MISMATCHED if name in known}
    optional = (*EPISODE, *_OF_VIEWS, *_MISMATCHED, "final_value", *_OF_SCORES)
    others = [
        name for name in ("index", *_OF_ROLLOUT) if name not in fields and (name in known or name not in optional)
    ]
    fields |= {name: _field(name, members.field(name)) for name in others}
    for row, ids, (first, end) in zip(groups, prompts, pairwise(rollouts.offsets.to_pylist()), strict=True):
        of_prompt = {name: ids if name == "prompt_token_ids" else row[name] for name in _OF_PROMPT}
        if row["candidates"]:
            of_prompt["candidates"] = row["candidates"]
        if row.get("views"):
            of_prompt["views"] = row["views"]
        for i in range(first, end):
            found = {name: fields[name][i] for name in _OF_ROLLOUT if name in fields}
            yield {
                "group": row["group"],
                "place": None if row["place"] is None else [row["round"], row["place"]],
                "kept": row["kept"],
                "trained": row["trained"],
                "prompt_id": row["prompt_id"],
                "epoch": row["epoch"],
                "index": fields["index"][i],
                **of_prompt,
                **{name: value for name, value in found.items() if value is not None or name not in _OF_SOME},
            }


def group_fields(table: pa.Table) -> list[dict[str, Any]]:
    """The fields of a table's groups, of any columns but ``rollouts`` and ``prompt_token_ids``."""
    rows: list[dict[str, Any]] = _read(table.to_pylist())
    for row in rows:
        if "columns_as_text" in row:
            row["columns_as_text"] = dict(row["columns_as_text"])
    return rows


def rollout_fields(table: pa.Table, names: Sequence[str]) -> tuple[list[int], dict[str, list[Any]]]:
    """Where each group's rollouts begin, and end; and these fields of all rollouts of a table.

    ``mask`` is the number of tokens that the policy wrote, ``turn_rewards`` the number of turns. A field that the file
    lacks is None.
    """
    rollouts = table["rollouts"].combine_chunks()
    members, offsets = rollouts.values, rollouts.offsets.to_pylist()
    known = {field.name for field in members.type}
    nothing = [None] * len(members)
    return offsets, {name: _field(name, members.field(name)) if name in known else nothing for name in names}


def rollout_sums(table: pa.Table, names: Sequence[str]) -> tuple[list[int], dict[str, list[float | None]]]:
    """Where each group's rollouts begin, and end; and the sums of these token columns over the policy's tokens.

    None where there is not a number for each token.
    """
    rollouts = table["rollouts"].combine_chunks()
    members = rollouts.values
    known, masks = {field.name for field in members.type}, _split(members.field("mask"))
    columns = {name: _split(members.field(name)) if name in known else [None] * len(members) for name in names}
    return rollouts.offsets.to_pylist(), {name: list(map(own_sum, each, masks)) for name, each in columns.items()}


def _field(name: str, values: pa.Array) -> list[Any]:
    if name == "mask":
        written = np.concatenate([[0], np.cumsum(_numbers(values.values))])
        counts: list[Any] = np.diff(written[_numbers(values.offsets)]).tolist()
        return counts
    if name == "turn_rewards":
        lengths: list[Any] = pc.list_value_length(values).to_pylist()
        return lengths
    found: list[Any] = _read(values.to_pylist())
    return [None if each is None else dict(each) for each in found] if pa.types.is_map(values.type) else found


def _split(lists: Any) -> list[Any]:
    """The arrays of a column of lists of numbers; None is null."""
    values, places = _numbers(lists.values), lists.offsets.to_pylist()
    known = lists.is_valid().to_pylist()
    return [
        values[first:end] if is_known else None for (first, end), is_known in zip(pairwise(places), known, strict=True)
    ]


def _numbers(values: pa.Array) -> Any:
    """An array of numpy; ``to_numpy`` imports pandas where it is installed, which takes a second."""
    if values.null_count:
        return values.to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(values.type):
        return np.from_dlpack(pc.cast(values, pa.uint8())).astype(np.bool_)
    return np.from_dlpack(values)


def _token_column(members: pa.StructArray, column: TokenColumn) -> list[Any]:
    """The numbers of each rollout: an array, or one for each optimizer step; None is null, and what the file lacks."""
    if members.type.get_field_index(listed(column)) < 0:
        return [None] * len(members)
    values = members.field(listed(column))
    if column.is_per_update:
        return _split_twice(values)
    if column.known != "by credit":
        return _split(values)
    lengths = pc.list_value_length(members.field("token_ids")).to_pylist()
    ones = members.field(column.record).to_pylist()
    return [
        each if one is None else np.full(length, one)
        for one, each, length in zip(ones, _split(values), lengths, strict=True)
    ]


def _split_twice(lists: Any) -> list[list[Any]]:
    inner = _split(lists.values)
    return [inner[first:end] for first, end in pairwise(lists.offsets.to_pylist())]
