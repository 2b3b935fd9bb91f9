"""Rollouts as lines of RUN/rollouts, written and read: all that a reward can see, and what the step made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    PreUpdateStatistics,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
)


def rollout_records(index: int, group: CreditedGroup) -> Iterator[dict[str, Any]]:
    """Everything about each rollout of a step's group ``index``, the greedy one last.

    Advantages are per completion token; log-probs and entropies are in nats, in the order of ``token_ids``, with the
    nine digits that make the same float32 again; the learner's are empty for a rollout that is in no loss. A greedy
    rollout has none of them. ``columns_as_text`` has the ``repr`` of columns that JSON cannot hold. ``answers`` are
    those that rewards have read from the completion.

    ``update_logprobs`` and ``update_entropy`` have a list for each optimizer step that took the rollout in, an empty
    one for a skipped step; ``update_logprobs`` are left out if they equal ``learner_logprobs``.
    """
    of_group = {"group": index, "place": group.scored.place, "kept": group.scored.kept, "trained": group.trained}
    for member in range(len(group.scored.group.rollouts)):
        yield {**of_group, **_record(group.scored, member, greedy=False), **_learned(group, member)}
    if group.scored.greedy is not None:
        yield {**of_group, **_record(group.scored.greedy, 0, greedy=True), **_learned(None, 0)}


def step_records(groups: Iterable[CreditedGroup], state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of a step.

    Args:
        state: The algorithm's state before the step; the first record has it as ``algorithm_state`` if it is not empty.
    """
    first = {"algorithm_state": state} if state else {}
    for index, group in enumerate(groups):
        for record in rollout_records(index, group):
            yield {**record, **first}
            first = {}


def group_records(groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    """Records without advantages, from which ``read_groups`` makes the groups again."""
    return [
        record
        for index, group in enumerate(groups)
        for record in rollout_records(index, CreditedGroup(group, *_nothing(group)))
    ]


def read_groups(records: Sequence[Mapping[str, Any]], media: Path) -> list[ScoredGroup]:
    """The scored groups of such records; columns that JSON cannot hold are missing.

    Args:
        media: The folder of their images.
    """
    by_group = groupby(records, key=lambda record: record["group"])
    return [_scored([(record, _parsed(record, media, "")) for record in members]) for _, members in by_group]


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout and its rewards.

    Attributes:
        rewards: Each component's value by name; None where it was not scored.
        valid: True if it entered statistics and loss.
        greedy: True if it is the prompt's one rollout at temperature 0.
        where: File and line.
    """

    rollout: Rollout
    rewards: Mapping[str, float | None]
    valid: bool
    greedy: bool
    where: str

    @property
    def text(self) -> str:
        """The completion."""
        return self.rollout.text

    @property
    def images(self) -> tuple[Path, ...]:
        """The files of the prompt's images, as the model saw them."""
        return tuple(Path(image.path) for image in self.rollout.images)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group of a step's record.

    Attributes:
        credited: As the run made it; images and columns as ``read_rollouts`` has them.
        lost_columns: Columns that JSON could not hold.
        where: File and line of its first rollout.
    """

    credited: CreditedGroup
    lost_columns: tuple[str, ...]
    where: str

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return self.credited.scored.group.rollouts


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A run's record of one step.

    Attributes:
        groups: In the order of the file: those that were trained on first, in the order of the batch.
        state: The algorithm's state before the step, empty if it had none.
        is_complete: True if it has every optimizer step's ``PreUpdateStatistics``, which older versions did not record.
    """

    groups: Sequence[RecordedGroup]
    state: Mapping[str, Any]
    is_complete: bool


def read_step(file: Path) -> RecordedStep:
    """The groups of a step's file.

    Raises:
        DataError: It cannot be read, or a line is no record of a rollout, or does not fit the others.
    """
    records, groups = list(_read(file)), list[RecordedGroup]()
    for _, found in groupby(records, key=lambda pair: pair[0].get("group")):
        members = list(found)
        where = members[0][1].where
        with _damage(where):
            groups.append(_recorded_group(members, where))
    if not groups:
        raise DataError("the file has no rollouts", where=str(file), remedy="give a file that a run wrote")
    first = records[0][0]
    return RecordedStep(groups, first.get("algorithm_state") or {}, "update_entropy" in first)


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
        yield from (found for _, found in _read(file))


def _learned(group: CreditedGroup | None, member: int) -> dict[str, Any]:
    """A step's results for a member of the group; all empty for a greedy rollout."""
    none = np.zeros(0)
    advantages, logprobs = (none, none) if group is None else (group.advantages[member], group.logprobs[member])
    reference = group.reference_logprobs[member] if group is not None and group.reference_logprobs else none
    updates = group.updates[member] if group is not None and group.updates else ()
    repeated = len(updates) == 1 and np.array_equal(updates[0].logprobs, logprobs)
    return {
        "advantage": np.asarray(advantages, np.float64).tolist(),
        "learner_logprobs": _short(logprobs),
        "reference_logprobs": _short(reference),
        "update_logprobs": [] if repeated else [_short(each.logprobs) for each in updates],
        "update_entropy": [_short(each.entropy) for each in updates],
    }


def _short(values: FloatArray) -> list[float]:
    """float32 values as numbers of nine digits, which float32 rounds to the same values again."""
    exact = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (8 - np.floor(np.log10(np.abs(exact))))
        rounded = np.round(exact * scale) / scale
    short: list[float] = np.where(np.float32(rounded) == np.float32(exact), rounded, exact).tolist()
    return short


def _record(scored: ScoredGroup, member: int, *, greedy: bool) -> dict[str, Any]:
    rollout, prompt, row = scored.group.rollouts[member], scored.group.prompt, scored.group.prompt.prompt
    plain = {name: value for name, value in row.columns.items() if _is_plain(value)}
    return {
        "prompt_id": prompt.id,
        "epoch": prompt.epoch,
        "index": rollout.index,
        "source": row.source,
        "messages": [{"role": message.role, "content": message.content} for message in row.messages],
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids.tolist(),
        "images": [{"hash": image.hash, "width": image.width, "height": image.height} for image in prompt.images],
        "answer": row.answer,
        "choices": list(row.choices),
        "columns": plain,
        "columns_as_text": {name: repr(value) for name, value in row.columns.items() if name not in plain},
        "demonstration": row.demonstration,
        "completion": rollout.text,
        "token_ids": rollout.token_ids.tolist(),
        "mask": rollout.mask.tolist(),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "rewards": {name: float(values[member]) for name, values in scored.components.items()},
        "reward": float(scored.rewards[member]),
        "answers": {name: answers[member] for name, answers in scored.answers.items()},
        "valid": bool(scored.valid[member]),
        "greedy": greedy,
        "sampler_logprobs": _short(rollout.sampler_logprobs),
    }


def _nothing(group: ScoredGroup) -> tuple[list[FloatArray], list[FloatArray]]:
    """Neither advantages nor log-probs."""
    return [np.zeros(0)] * len(group.group.rollouts), [np.zeros(0)] * len(group.group.rollouts)


def _scored(members: Sequence[tuple[Mapping[str, Any], RecordedRollout]]) -> ScoredGroup:
    """A group from its records, the greedy one last."""
    sampled = [pair for pair in members if not pair[1].greedy]
    greedy = [pair for pair in members if pair[1].greedy]
    prompt, first = members[0][1].rollout.prompt, members[0][0]

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

    return replace(
        scored(sampled, scored(greedy, None) if greedy else None), kept=bool(first["kept"]), place=_place(first)
    )


def _recorded_group(members: Sequence[tuple[Mapping[str, Any], RecordedRollout]], where: str) -> RecordedGroup:
    scored = _scored(members)
    records = [record for record, found in members if not found.greedy]
    if [found.rollout.index for _, found in members if not found.greedy] != list(range(len(records))):
        raise ValueError("the members of its group are not all there, one after another")
    first = records[0]
    logprobs = [_floats(record, "learner_logprobs") for record in records]
    reference = [_floats(record, "reference_logprobs") for record in records if record.get("reference_logprobs")]
    credited = CreditedGroup(
        scored=scored,
        advantages=[_floats(record, "advantage", np.float64) for record in records],
        logprobs=logprobs,
        trained=bool(first.get("trained", first["kept"])),
        reference_logprobs=reference if len(reference) == len(records) else (),
        updates=[_updates(record, values) for record, values in zip(records, logprobs, strict=True)],
    )
    return RecordedGroup(credited, tuple(first["columns_as_text"]), where)


def _place(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """(round, place) of a record's group; an older record has none, and its place is the order of the file."""
    place = record.get("place", [0, record["group"]])
    return None if place is None else (int(place[0]), int(place[1]))


def _updates(record: Mapping[str, Any], logprobs: FloatArray) -> list[PreUpdateStatistics]:
    entropies = record.get("update_entropy", [])
    found = record.get("update_logprobs") or [logprobs] * len(entropies)
    return [
        PreUpdateStatistics(_floats(record, "update_logprobs", of=each), _floats(record, "update_entropy", of=entropy))
        for each, entropy in zip(found, entropies, strict=True)
    ]


def _floats(record: Mapping[str, Any], key: str, dtype: Any = np.float32, of: Any = None) -> FloatArray:
    """One number for each token of the completion, or none at all."""
    values: FloatArray = np.array(record.get(key, []) if of is None else of, dtype)
    if values.shape not in ((0,), (len(record["token_ids"]),)):
        raise ValueError(f"{key} has shape {values.shape}, and the completion has {len(record['token_ids'])} tokens")
    return values


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


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


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """Turn errors of a record that cannot be understood into a DataError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"this line is no record of a rollout: {type(error).__name__}: {error}"
        raise DataError(what, where=where, remedy="give files that a run wrote") from error


def _read(file: Path) -> Iterator[tuple[dict[str, Any], RecordedRollout]]:
    beside, above = file.parent / "media", file.parent.parent / "media"
    media = beside if beside.is_dir() else above
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                with _damage(where):
                    record = json.loads(line)
                    found = _parsed(record, media, where)
                yield record, found
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read recorded rollouts: {error}", where=str(file)) from error


def _parsed(record: Mapping[str, Any], media: Path, where: str) -> RecordedRollout:
    images = [
        ImageRef(each["hash"], each["width"], each["height"], str(media / f"{each['hash']}.png"))
        for each in record["images"]
    ]
    row = Prompt(
        id=record["prompt_id"],
        messages=tuple(Message(each["role"], each["content"]) for each in record["messages"]),
        answer=record["answer"],
        columns=record["columns"],
        demonstration=record["demonstration"],
        source=record["source"],
        choices=tuple(record["choices"]),
    )
    prompt = EncodedPrompt(
        prompt=row,
        text=record["prompt"],
        token_ids=np.array(record["prompt_token_ids"], np.int32),
        images=tuple(images),
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
        greedy=record["greedy"],
    )
    return RecordedRollout(rollout, record["rewards"], record["valid"], record["greedy"], where)


def _segments(ids: Any, mask: BoolArray, logprobs: Any) -> tuple[Segment, ...]:
    """Stretches with one author; neighbours by the same author are one."""
    parts = [list(part) for _, part in groupby(range(len(mask)), key=partial(np.ndarray.item, mask))]
    return tuple(Segment(ids[part], bool(mask[part[0]]), logprobs[part]) for part in parts)
