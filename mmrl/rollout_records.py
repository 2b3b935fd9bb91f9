"""Rollouts as lines of RUN/rollouts, written and read: everything that a reward can see, and what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import DataError
from mmrl.types import (
    BoolArray,
    CreditedGroup,
    EncodedPrompt,
    FloatArray,
    ImageRef,
    Message,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
)


def rollout_records(index: int, group: CreditedGroup) -> Iterator[dict[str, Any]]:
    """Everything about each rollout of a step's group ``index``, the greedy one last.

    Advantages are per completion token; log-probs are in nats, in the order of ``token_ids``, the learner's empty for a
    rollout that is in no loss. A greedy rollout has neither. Of columns that JSON cannot hold, ``columns_as_text``
    has what Python shows of them. ``answers`` is what rewards that read answers found the completion to say.
    """
    for member, (advantages, logprobs) in enumerate(zip(group.advantages, group.logprobs, strict=True)):
        yield {"group": index, **_record(group.scored, member, group.kept, advantages, logprobs, greedy=False)}
    if group.scored.greedy is not None:
        none = np.zeros(0)
        yield {"group": index, **_record(group.scored.greedy, 0, group.kept, none, none, greedy=True)}


def group_records(groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    """What ``read_groups`` makes the groups of again: records without advantages."""
    return [
        record
        for index, group in enumerate(groups)
        for record in rollout_records(index, CreditedGroup(group, True, *_nothing(group)))
    ]


def read_groups(records: Sequence[Mapping[str, Any]], media: Path) -> list[ScoredGroup]:
    """The scored groups of such records; columns that JSON cannot hold are missing.

    Args:
        media: Where their images are.
    """
    by_group = groupby(records, key=lambda record: record["group"])
    return [_scored([(record, _parsed(record, media, "")) for record in members]) for _, members in by_group]


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout and what it got.

    Attributes:
        rewards: Of each component by name; None where it was not scored.
        valid: Whether it entered statistics and loss.
        greedy: Whether it is the prompt's one rollout at temperature 0.
        where: File and line.
    """

    rollout: Rollout
    rewards: Mapping[str, float | None]
    valid: bool
    greedy: bool
    where: str


def read_rollouts(path: str | Path) -> Iterator[RecordedRollout]:
    """The rollouts of a file that a run or an evaluation wrote, of a folder of such files, or of a run's folder.

    Each is as its rewards saw it, but for columns that JSON cannot hold, which are missing, and tuples, which are
    lists. Images are those in the run's media folder, if the file still lies where the run wrote it.

    Raises:
        DataError: There are none, or a line is no record of a rollout.
    """
    path = Path(path).expanduser()
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = [path] if path.is_file() else sorted(folder.glob("*.jsonl"))
    if not files:
        remedy = "give a file such as RUN/rollouts/step-000001.jsonl, or the folder of a run that has sampled"
        raise DataError("there are no recorded rollouts", where=str(path), remedy=remedy)
    for file in files:
        yield from _read(file)


def _record(
    scored: ScoredGroup, member: int, kept: bool, advantages: FloatArray, logprobs: FloatArray, *, greedy: bool
) -> dict[str, Any]:
    rollout, prompt = scored.group.rollouts[member], scored.group.prompt
    plain = {name: value for name, value in prompt.columns.items() if _is_plain(value)}
    return {
        "prompt_id": prompt.id,
        "epoch": prompt.epoch,
        "index": rollout.index,
        "source": prompt.source,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids.tolist(),
        "images": [{"hash": image.hash, "width": image.width, "height": image.height} for image in prompt.images],
        "answer": prompt.answer,
        "choices": list(prompt.choices),
        "columns": plain,
        "columns_as_text": {name: repr(value) for name, value in prompt.columns.items() if name not in plain},
        "demonstration": prompt.demonstration,
        "completion": rollout.text,
        "token_ids": rollout.token_ids.tolist(),
        "mask": rollout.mask.tolist(),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "rewards": {name: float(values[member]) for name, values in scored.components.items()},
        "reward": float(scored.rewards[member]),
        "answers": {name: answers[member] for name, answers in scored.answers.items()},
        "valid": bool(scored.valid[member]),
        "kept": kept,
        "greedy": greedy,
        "advantage": np.asarray(advantages, np.float64).tolist(),
        "sampler_logprobs": np.asarray(rollout.sampler_logprobs, np.float64).tolist(),
        "learner_logprobs": np.asarray(logprobs, np.float64).tolist(),
    }


def _nothing(group: ScoredGroup) -> tuple[list[FloatArray], list[FloatArray]]:
    """Neither advantages nor log-probs."""
    return [np.zeros(0)] * len(group.group.rollouts), [np.zeros(0)] * len(group.group.rollouts)


def _scored(members: Sequence[tuple[Mapping[str, Any], RecordedRollout]]) -> ScoredGroup:
    """A group of its records, the greedy one last."""
    sampled = [pair for pair in members if not pair[1].greedy]
    greedy = [pair for pair in members if pair[1].greedy]
    prompt = members[0][1].rollout.prompt

    def scored(pairs: Sequence[tuple[Mapping[str, Any], RecordedRollout]], partner: ScoredGroup | None) -> ScoredGroup:
        rollouts = tuple(replace(found.rollout, prompt=prompt) for _, found in pairs)
        names = pairs[0][1].rewards
        return ScoredGroup(
            RolloutGroup(prompt, rollouts),
            np.array([record["reward"] for record, _ in pairs], np.float64),
            np.array([found.valid for _, found in pairs], np.bool_),
            {name: np.array([_number(found.rewards[name]) for _, found in pairs]) for name in names},
            partner,
            {name: [record["answers"][name] for record, _ in pairs] for name in pairs[0][0].get("answers", {})},
        )

    return scored(sampled, scored(greedy, None) if greedy else None)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value so that it can be read again, numpy's arrays as lists."""
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


def _read(file: Path) -> Iterator[RecordedRollout]:
    beside, above = file.parent / "media", file.parent.parent / "media"
    media = beside if beside.is_dir() else above
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                try:
                    yield _parsed(json.loads(line), media, where)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    what = f"this line is no record of a rollout: {type(error).__name__}: {error}"
                    raise DataError(what, where=where, remedy="give files that a run wrote") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read recorded rollouts: {error}", where=str(file)) from error


def _parsed(record: Mapping[str, Any], media: Path, where: str) -> RecordedRollout:
    images = [
        ImageRef(each["hash"], each["width"], each["height"], str(media / f"{each['hash']}.png"))
        for each in record["images"]
    ]
    prompt = EncodedPrompt(
        id=record["prompt_id"],
        messages=tuple(Message(each["role"], each["content"]) for each in record["messages"]),
        answer=record["answer"],
        columns=record["columns"],
        demonstration=record["demonstration"],
        text=record["prompt"],
        token_ids=np.array(record["prompt_token_ids"], np.int32),
        images=tuple(images),
        source=record["source"],
        choices=tuple(record["choices"]),
        epoch=record.get("epoch", 0),
    )
    mask: BoolArray = np.array(record["mask"], np.bool_)
    ids, logprobs = np.array(record["token_ids"], np.int32), np.array(record["sampler_logprobs"], np.float32)
    rollout = Rollout(
        prompt=prompt,
        segments=_segments(ids, mask, logprobs),
        index=record["index"],
        text=record["completion"],
        finish_reason=record["finish_reason"],
        weight_version=record["weight_version"],
    )
    return RecordedRollout(rollout, record["rewards"], record["valid"], record["greedy"], where)


def _segments(ids: Any, mask: BoolArray, logprobs: Any) -> tuple[Segment, ...]:
    """Stretches with one author; neighbours by the same author are one."""
    parts = [list(part) for _, part in groupby(range(len(mask)), key=partial(np.ndarray.item, mask))]
    return tuple(Segment(ids[part], bool(mask[part[0]]), logprobs[part]) for part in parts)
