"""Rollouts as JSON objects, one for each: in checkpoints, in evaluations, on the command line, and in older files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.rollout.records.episodes import episode_fields, image_record, view_records
from mmrl.token_columns import COLUMNS, CRITIC_COLUMNS
from mmrl.types import CreditedGroup, FloatArray, ScoredGroup


def short_floats(values: FloatArray) -> list[float]:
    """float32 values as numbers of nine digits, which float32 rounds to the same values again."""
    exact = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (8 - np.floor(np.log10(np.abs(exact))))
        rounded = np.round(exact * scale) / scale
    short: list[float] = np.where(np.float32(rounded) == np.float32(exact), rounded, exact).tolist()
    return short


def as_list(field: str, values: Any) -> Any:
    """The numbers of a field as JSON has them."""
    return short_floats(values) if values.dtype == np.float32 else values.tolist()


def group_records(groups: Sequence[ScoredGroup], numbers: Callable[[str, Any], Any] = as_list) -> list[dict[str, Any]]:
    """Records of groups that no step has learned from, each group's greedy rollout last; ``read_groups`` reads them.

    ``columns_as_text`` has the ``repr`` of columns that JSON cannot hold. ``answers`` are those that rewards have read
    from the completion. What a step adds (advantages, the learner's log-probs) is there and empty.

    Args:
        numbers: Turns the array of a field with a number for each token into what JSON holds.
    """
    return [record for index, group in enumerate(groups) for record in _records(index, group, numbers)]


def credited_records(groups: Sequence[CreditedGroup]) -> list[dict[str, Any]]:
    """Records as ``group_records``, with the token columns that the groups have, such as log-probs of an evaluation."""
    records = list[dict[str, Any]]()
    for index, group in enumerate(groups):
        known = {
            column.record: values
            for column in COLUMNS
            if column.known == "before the step" and len(values := getattr(group, column.credited))
        }
        members = _records(index, group.scored, as_list)
        for member, record in zip(range(len(group.scored.rollouts)), members, strict=False):
            of_member: dict[str, Any] = {name: short_floats(values[member]) for name, values in known.items()}
            scores = short_floats(group.final_values[member : member + 1])
            of_member |= {"final_value": scores[0]} if scores and not np.isnan(scores[0]) else {}
            records.append(record | of_member)
    return records


def _records(index: int, group: ScoredGroup, numbers: Callable[[str, Any], Any]) -> Iterator[dict[str, Any]]:
    of_group = {"group": index, "place": group.place, "kept": group.kept, "trained": False}
    columns = [column for column in COLUMNS if column.known != "sampled" and column not in CRITIC_COLUMNS]
    nothing: dict[str, Any] = {column.record: [] for column in columns}
    for member in range(len(group.rollouts)):
        yield {**of_group, **_record(group, member, numbers, greedy=False), **nothing}
    if group.greedy is not None:
        yield {**of_group, **_record(group.greedy, 0, numbers, greedy=True), **nothing}


def _record(scored: ScoredGroup, member: int, numbers: Callable[[str, Any], Any], *, greedy: bool) -> dict[str, Any]:
    rollout, prompt, row = scored.group.rollouts[member], scored.group.prompt, scored.group.prompt.prompt
    plain, as_text = plain_columns(row.columns)
    return {
        "prompt_id": prompt.id,
        "epoch": prompt.epoch,
        "index": rollout.index,
        "source": row.source,
        "messages": [{"role": message.role, "content": message.content} for message in row.messages],
        "prompt": prompt.text,
        "prompt_token_ids": numbers("prompt_token_ids", prompt.token_ids),
        "images": [image_record(image) for image in prompt.images],
        "answer": row.answer,
        "choices": list(row.choices),
        "columns": plain,
        "columns_as_text": as_text,
        "demonstration": row.demonstration,
        "completion": rollout.text,
        "token_ids": numbers("token_ids", rollout.token_ids),
        "mask": numbers("mask", rollout.mask),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "rewards": {name: float(values[member]) for name, values in scored.components.items()},
        "reward": float(scored.rewards[member]),
        "answers": {name: answers[member] for name, answers in scored.answers.items()},
        "valid": bool(scored.valid[member]),
        "greedy": greedy,
        **{
            each.record: numbers(each.record, getattr(rollout, each.name))
            for each in COLUMNS
            if each.known == "sampled"
        },
        **episode_fields(rollout),
        **({"views": view_records(prompt)} if prompt.views else {}),
        **({"view": rollout.view} if rollout.view else {}),
        **({"recalled": True} if rollout.recalled else {}),
        **({"retries": row.retries} if row.retries else {}),
        **(
            {"token_rewards": numbers("token_rewards", of_tokens[member])}
            if (of_tokens := scored.token_rewards)
            else {}
        ),
    }


def plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a parquet file as JSON can hold it, and as schema 1 had it."""
    lists = {column.record for column in COLUMNS}
    return {name: [] if value is None and name in lists else _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return as_list("", value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def plain_columns(columns: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The columns that JSON can hold, and the ``repr`` of the others."""
    plain = {name: value for name, value in columns.items() if _is_plain(value)}
    return plain, {name: repr(value) for name, value in columns.items() if name not in plain}


def _is_plain(value: Any) -> bool:
    """True if JSON can hold a value so that it can be read again, numpy's arrays as lists."""
    match value:
        case None | bool() | int() | float() | str():
            return True
        case np.ndarray() | np.generic():
            return value.dtype.kind in "biuf" or _is_plain(value.tolist())
        case list() | tuple():
            return all(map(_is_plain, value))
        case Mapping():
            return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
        case _:
            return False
