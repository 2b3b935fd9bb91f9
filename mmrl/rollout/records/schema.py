"""The columns of a step's file of rollouts (schema 2)."""

from __future__ import annotations

import pyarrow as pa

from mmrl.token_columns import COLUMNS, CRITIC_COLUMNS, MISMATCHED_COLUMNS, VIEW_COLUMNS, TokenColumn

SCHEMA = 2
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


_SEGMENT = {
    "tokens": pa.int32(),
    "by_policy": pa.bool_(),
    "weight_version": pa.int64(),
    "images": _IMAGES,
    "role": pa.string(),
    "finish_reason": pa.string(),
}
_CONTINUES = {"continues": pa.bool_()}
"""The field of segments that go on with a turn, null for others; only files with such a segment have it."""
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
        "segments": pa.list_(pa.struct(_SEGMENT)),  # null where ``mask`` tells all
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
OF_VIEWS = {
    "view": pa.string(),  # null where it was sampled from the prompt itself
    **{column.record: pa.map_(pa.string(), pa.list_(_FLOATS)) for column in VIEW_COLUMNS},
}
OF_SCORES = {"update_final_values": _FLOATS}
"""The field with a reward model's score before each optimizer step; ``final_value`` is the one before the first."""
OF_MISMATCHED = {column.mismatched_record: pa.list_(pa.from_numpy_dtype(column.dtype)) for column in MISMATCHED_COLUMNS}
"""Fields with a number for each token of another row's completion, given this row's prompt."""
OF_SPANS = {"token_rewards": _EXACT}
"""The field with the values of parts of the text, at each part's last token."""
OF_EXPERIENCE = {"recalled": pa.bool_()}
"""The field of rollouts of earlier steps that have taken members' places, null for others."""
OF_CRITIC = _fields_of(*CRITIC_COLUMNS)
OF_BRANCHES = {"branch": pa.struct({"member": pa.int32(), "turn": pa.int32()})}
"""The field of episodes that go on from others of their group, null for others."""


def group_schema(
    *,
    views: bool,
    mismatched: bool,
    scores: bool = False,
    critic: bool = False,
    continues: bool = False,
    branches: bool = False,
    spans: bool = False,
    recalled: bool = False,
    retried: bool = False,
) -> pa.Schema:
    """The schema of a step's file; ``prompt_token_ids`` of a view are null where they are the prompt's.

    Args:
        views: True for prompts that have views.
        mismatched: True for rollouts whose prompts were given other rows' completions.
        scores: True for rollouts that a reward model has scored.
        critic: True for rollouts that a critic has learned from.
        continues: True for rollouts of which a turn was sampled in parts.
        branches: True for episodes that go on from others.
        spans: True for rollouts whose algorithm asks for values of parts of the text.
        recalled: True for rollouts of earlier steps.
        retried: True for groups in place of rejected ones of the same prompt: ``retries`` counts these.
    """
    more = {
        **(OF_VIEWS if views else {}),
        **(OF_MISMATCHED if mismatched else {}),
        **(OF_SCORES if scores else {}),
        **(OF_CRITIC if critic else {}),
        **(OF_BRANCHES if branches else {}),
        **(OF_SPANS if spans else {}),
        **(OF_EXPERIENCE if recalled else {}),
    }
    fields = {field.name: field.type for field in ROLLOUT} | more
    if continues:
        fields["segments"] = pa.list_(pa.struct(_SEGMENT | _CONTINUES))
    rollout = pa.struct(fields)
    view = pa.struct({"name": pa.string(), "images": _IMAGES, "prompt_token_ids": _IDS})
    of_group = [field for field in GROUP if field.name != "rollouts"]
    of_group += [pa.field("views", pa.list_(view))] if views else []
    of_group += [pa.field("retries", pa.int32())] if retried else []
    return pa.schema([*of_group, pa.field("rollouts", pa.list_(rollout))])


FIELDS = frozenset(
    (
        *GROUP.names,
        "views",
        *(each.name for each in ROLLOUT),
        *OF_VIEWS,
        *OF_MISMATCHED,
        *OF_SCORES,
        *OF_CRITIC,
        *OF_BRANCHES,
        *OF_SPANS,
        *OF_EXPERIENCE,
        *("retries", "algorithm_state", "failed", "values"),
    )
)
"""All fields of records, also of those in JSON; ``values`` is in older files, and null."""
EPISODE = ("episode", "components", "failure")
AS_JSON = ("answer", "columns", "arguments", "info")
"""Fields of rows, calls and turns that are JSON in their columns."""
ABSENT = ("file_size", "text", "image", "continues")
"""Fields that an image, a part of an observation, or a segment lacks where they are null."""
OF_PROMPT = (
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
OF_ROLLOUT = (
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
    *OF_BRANCHES,
    *OF_VIEWS,
    *OF_MISMATCHED,
    "final_value",
    *OF_SCORES,
    *OF_SPANS,
    *OF_EXPERIENCE,
)
"""Fields of a record in its order, those of the prompt and those of the rollout."""
OF_SOME = ("segments", *EPISODE, *OF_BRANCHES, *OF_VIEWS, *OF_MISMATCHED, "final_value", *OF_SCORES, *OF_SPANS)
OF_SOME += tuple(OF_EXPERIENCE)
OF_SOME += tuple(column.record for column in CRITIC_COLUMNS)
"""Fields that a record lacks where they are null."""
BY_BYTE = [
    f"rollouts.list.element.{each.record}{'.list.element' * (1 + each.is_per_update)}"
    for each in COLUMNS
    if each.dtype == "float32"
]
"""Columns that are split into their first, second, ... bytes before zstd sees them."""
