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
from mmrl.rollout.records.schema import (
    ABSENT,
    AS_JSON,
    EPISODE,
    FIELDS,
    OF_BRANCHES,
    OF_EXPERIENCE,
    OF_MISMATCHED,
    OF_PROMPT,
    OF_ROLLOUT,
    OF_SCORES,
    OF_SOME,
    OF_SPANS,
    OF_VIEWS,
    SCHEMA,
    listed,
)
from mmrl.rollout.records.unknown import tell_unknown
from mmrl.token_columns import COLUMNS, TokenColumn

_ESCAPE = "\0"


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
            known = {name: each for name, each in value.items() if each is not None or name not in ABSENT}
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
    fields |= {name: _split(members.field(name)) for name in (*OF_MISMATCHED, *OF_SPANS) if name in known}
    optional = (*EPISODE, *OF_BRANCHES, *OF_VIEWS, *OF_MISMATCHED, "final_value", *OF_SCORES, *OF_SPANS, *OF_EXPERIENCE)
    others = [name for name in ("index", *OF_ROLLOUT) if name not in fields and (name in known or name not in optional)]
    fields |= {name: _field(name, members.field(name)) for name in others}
    for row, ids, (first, end) in zip(groups, prompts, pairwise(rollouts.offsets.to_pylist()), strict=True):
        of_prompt = {name: ids if name == "prompt_token_ids" else row[name] for name in OF_PROMPT}
        if row["candidates"]:
            of_prompt["candidates"] = row["candidates"]
        if row.get("views"):
            of_prompt["views"] = row["views"]
        if row.get("retries"):
            of_prompt["retries"] = row["retries"]
        for i in range(first, end):
            found = {name: fields[name][i] for name in OF_ROLLOUT if name in fields}
            yield {
                "group": row["group"],
                "place": None if row["place"] is None else [row["round"], row["place"]],
                "kept": row["kept"],
                "trained": row["trained"],
                "prompt_id": row["prompt_id"],
                "epoch": row["epoch"],
                "index": fields["index"][i],
                **of_prompt,
                **{name: value for name, value in found.items() if value is not None or name not in OF_SOME},
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
