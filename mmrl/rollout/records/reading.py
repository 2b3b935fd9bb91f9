"""Reads records of rollouts, of a run's steps in either schema, of evaluations and of checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.config.evaluation_names import WORD
from mmrl.errors import DataError
from mmrl.rollout.records.episodes import episode_of, image_of, segments_of, with_views
from mmrl.rollout.records.lines import plain_record
from mmrl.token_columns import COLUMNS, MISMATCHED_COLUMNS, VIEW_COLUMNS, TokenColumn
from mmrl.types import (
    Candidate,
    CreditedGroup,
    EncodedPrompt,
    FloatArray,
    Message,
    PreUpdateStatistics,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
)

PARQUET = "parquet"
"""The suffix of a step's file since schema 2."""
EVALUATIONS = "evaluations"
"""The folder of a run with the groups of its evaluations."""
_OF_A_RUN = ("rollouts", "attempts.jsonl", "events.jsonl")
"""A folder that has one of these is a run's, whose other lines are no rollouts."""


def read_groups(records: Iterable[Mapping[str, Any]], media: Path) -> list[ScoredGroup]:
    """The scored groups of such records; columns that JSON cannot hold are missing.

    Args:
        media: The folder of their images.
    """
    by_group = groupby(records, key=lambda record: record["group"])
    return [_scored([(record, parsed(record, media, "")) for record in members]) for _, members in by_group]


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout and its rewards.

    Attributes:
        rewards: Each component's value by name; None where it was not scored.
        valid: True if it entered statistics and loss.
        greedy: True if it is the prompt's one rollout at temperature 0.
        where: The file, and the rollout's number in it, from 1; in JSON lines that is the line.
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
        where: The file, and the number of its first rollout.
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
        groups: In the order of the file: groups that were trained on first, in the order of the batch.
        state: The algorithm's state before the step, empty if it had none.
        is_complete: True if it has every optimizer step's ``PreUpdateStatistics``, which older versions did not record.
    """

    groups: Sequence[RecordedGroup]
    state: Mapping[str, Any]
    is_complete: bool


def read_step(file: Path) -> RecordedStep:
    """The groups of a step's file.

    Raises:
        DataError: It cannot be read, or something in it is no record of a rollout, or does not fit the others.
    """
    records, groups = list(_read(file)), list[RecordedGroup]()
    for _, found in groupby(records, key=lambda pair: pair[0].get("group")):
        members = list(found)
        where = members[0][1].where
        with damage(where):
            groups.append(_recorded_group(members, where))
    if not groups:
        raise DataError("the file has no rollouts", where=str(file), remedy="give a file that a run wrote")
    first = records[0][0]
    return RecordedStep(groups, first.get("algorithm_state") or {}, first.get("update_entropy") is not None)


def read_rollouts(path: str | Path) -> Iterator[RecordedRollout]:
    """The rollouts of a file that a run or an evaluation wrote, of a folder of such files, or of a run's folder.

    Each is as its rewards saw it, but for columns that JSON cannot hold, which are missing, and tuples, which are
    lists. Images are those in the run's media folder, if the file still lies where the run wrote it.

    Raises:
        DataError: There are none, or something in a file is no record of a rollout.
    """
    for file in recorded_files(path):
        yield from (found for _, found in _read(file))


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The rollouts of a file as JSON objects; of a parquet file they are as schema 1 would have them.

    Raises:
        DataError: It cannot be read, or something in it is no record of a rollout.
    """
    return (plain_record(record) for record, _ in _read(file))


def recorded_files(path: str | Path) -> list[Path]:
    """The files with rollouts: this one, or those of a folder or of a run's folder, in the order of their names.

    Raises:
        DataError: There are none.
    """
    path = Path(path).expanduser()
    is_run = any((path / name).exists() for name in _OF_A_RUN)
    folder = path / "rollouts" if is_run else path
    files = [path] if path.is_file() else [file for _, file in sorted(_by_name(folder).items())]
    if not files:
        remedy = "give a file such as RUN/rollouts/step-000001.parquet, or the folder of a run that has recorded some"
        raise DataError("there are no recorded rollouts", where=str(path), remedy=remedy)
    return files


def recorded_steps(run: Path) -> dict[int, Path]:
    """The file of each step that a run has recorded, in order."""
    return _numbered(run / "rollouts", "step")


def recorded_evaluations(run: Path, name: str = "", *, blank: bool = False) -> dict[int, Path]:
    """The file of each evaluation that a run has recorded, by step, in order.

    Args:
        name: The evaluation set's name; empty for that of a run that has only one.
        blank: True for those of prompts whose images were blank.
    """
    return _numbered(run / EVALUATIONS / name, "blank" if blank else "step")


def evaluation_names(run: Path) -> list[str]:
    """The names of the evaluation sets that a run has recorded, in their order; empty for one without a name."""
    folder = run / EVALUATIONS
    with suppress(OSError):
        names = sorted(each.name for each in folder.iterdir() if each.is_dir() and WORD.fullmatch(each.name))
        return [*([""] if _by_name(folder) else []), *names]
    return []


def _numbered(folder: Path, word: str) -> dict[int, Path]:
    """The files of a folder that are called by this word and a number, by that number."""
    names = {re.fullmatch(rf"{word}-(\d+)", name): file for name, file in _by_name(folder).items()}
    return dict(sorted((int(name[1]), file) for name, file in names.items() if name))


def _by_name(folder: Path) -> dict[str, Path]:
    """The files of a folder; of two versions of one the newer schema."""
    return {file.stem: file for suffix in ("jsonl", PARQUET) for file in folder.glob(f"*.{suffix}")}


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
            token_rewards=[_floats(r, "token_rewards", np.float64) for r, _ in pairs if "token_rewards" in r],
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
    of_step = [column for column in COLUMNS if column.known in ("by credit", "before the step")]
    columns: dict[str, Any] = {column.credited: _values(records, column) for column in of_step}
    updates = [_updates(record, before) for record, before in zip(records, columns["logprobs"], strict=True)]
    if columns["values"]:
        columns["critic_updates"] = [_critic_updates(record) for record in records]
    is_trained = bool(first.get("trained", first["kept"]))
    columns |= {column.mismatched: _mismatched(records, column) for column in MISMATCHED_COLUMNS}
    scores = [record.get("final_value") for record in records]
    if any(score is not None for score in scores):
        columns["final_values"] = np.array(list(map(_number, scores)), np.float32)
    credited = CreditedGroup(scored, **columns, trained=is_trained, updates=updates)
    return RecordedGroup(credited, tuple(first["columns_as_text"]), where)


def _place(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """(round, place) of a record's group; an older record has none, and its place is the order of the file."""
    place = record.get("place", [0, record["group"]])
    return None if place is None else (int(place[0]), int(place[1]))


def _values(records: Sequence[Mapping[str, Any]], column: TokenColumn) -> Sequence[FloatArray]:
    """The numbers of each of a group's rollouts; none if one lacks them."""
    known = [record for record in records if not column.may_lack or _is_known(record.get(column.record))]
    return [_floats(record, column.record, column.dtype) for record in known] if len(known) == len(records) else ()


def _mismatched(records: Sequence[Mapping[str, Any]], column: TokenColumn) -> Sequence[FloatArray]:
    """The numbers of each prompt with another row's completion; none if a record lacks them."""
    found = [record.get(column.mismatched_record) for record in records]
    return () if any(each is None for each in found) else [np.array(each, column.dtype) for each in found]


def _is_known(values: Any) -> bool:
    """True if a record has a column that it may lack; JSON has no other word for none than an empty list."""
    return values is not None and (isinstance(values, np.ndarray) or len(values) > 0)


def _updates(record: Mapping[str, Any], logprobs: FloatArray) -> list[PreUpdateStatistics]:
    entropies = record.get("update_entropy") or []
    found = record.get("update_logprobs") or [logprobs] * len(entropies)
    scores = record.get("update_final_values") or [None] * len(entropies)
    return [
        PreUpdateStatistics(
            _floats(record, "update_logprobs", of=each),
            _floats(record, "update_entropy", of=entropy),
            _views(record, number),
            score,
        )
        for number, (each, entropy, score) in enumerate(zip(found, entropies, scores, strict=True))
    ]


def _critic_updates(record: Mapping[str, Any]) -> list[PreUpdateStatistics]:
    nothing = np.zeros(0, np.float32)
    found = record.get("update_value") or []
    return [PreUpdateStatistics(nothing, nothing, vpreds=_floats(record, "update_value", of=each)) for each in found]


def _views(record: Mapping[str, Any], update: int) -> dict[str, PreUpdateStatistics]:
    """The statistics of an optimizer step given each view; none if the record has none."""
    columns = {column.name: (column.record, record.get(column.record) or {}) for column in VIEW_COLUMNS}

    def numbers(name: str, view: str) -> FloatArray:
        key, by_view = columns[name]
        return _floats(record, key, of=by_view[view][update])

    return {
        view: PreUpdateStatistics(numbers("logprobs", view), numbers("entropy", view))
        for view in columns["logprobs"][1]
    }


def _floats(record: Mapping[str, Any], key: str, dtype: Any = np.float32, of: Any = None) -> FloatArray:
    """One number for each token of the completion, or none at all."""
    given = record.get(key) if of is None else of
    values: FloatArray = np.array([] if given is None else given, dtype)
    if values.shape not in ((0,), (len(record["token_ids"]),)):
        raise ValueError(f"{key} has shape {values.shape}, and the completion has {len(record['token_ids'])} tokens")
    return values


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


@contextmanager
def damage(where: str) -> Iterator[None]:
    """Turn errors of a record that cannot be understood into a DataError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        what = f"this is no record of a rollout: {type(error).__name__}: {error}"
        raise DataError(what, where=where, remedy="give whole files that a run wrote") from error


def _read(file: Path) -> Iterator[tuple[dict[str, Any], RecordedRollout]]:
    """Each rollout with its record."""
    media, records = media_of(file), _records_of(file) if file.suffix == f".{PARQUET}" else _lines_of(file)
    try:
        for number in count(1):
            where = f"{file}:{number}"
            with damage(where):
                if (record := next(records, None)) is None:
                    return
                found = parsed(record, media, where)
            yield record, found
    except OSError as error:
        raise DataError(f"cannot read recorded rollouts: {error}", where=str(file)) from error


def _records_of(file: Path) -> Iterator[dict[str, Any]]:
    from mmrl.rollout.records.columns import read_records

    yield from read_records(file)


def _lines_of(file: Path) -> Iterator[dict[str, Any]]:
    from mmrl.rollout.records.columns import known_part

    with file.open(encoding="utf-8") as lines:
        yield from (known_part(json.loads(line), file) for line in lines)


def media_of(file: Path) -> Path:
    """The folder of a file's images: beside it or beside its folder, which may be that of one of several sets."""
    beside, above = file.parent / "media", file.parent.parent
    if beside.is_dir():
        return beside
    return (above.parent if above.name == EVALUATIONS else above) / "media"


def parsed(record: Mapping[str, Any], media: Path, where: str) -> RecordedRollout:
    row = Prompt(
        id=record["prompt_id"],
        messages=tuple(Message(each["role"], each["content"]) for each in record["messages"]),
        answer=record["answer"],
        columns=record["columns"],
        demonstration=record["demonstration"],
        source=record["source"],
        choices=tuple(record["choices"]),
        retries=record.get("retries") or 0,
        candidates=tuple(Candidate(each["text"], each["score"]) for each in record.get("candidates", ())),
    )
    prompt = EncodedPrompt(
        prompt=row,
        text=record["prompt"],
        token_ids=np.array(record["prompt_token_ids"], np.int32),
        images=tuple(image_of(each, media) for each in record["images"]),
        epoch=record.get("epoch", 0),
    )
    prompt = with_views(prompt, record.get("views") or (), media)
    ids, logprobs = np.array(record["token_ids"], np.int32), np.array(record["sampler_logprobs"], np.float32)
    rollout = Rollout(
        prompt=prompt,
        segments=segments_of(record, ids, logprobs, media),
        index=record["index"],
        text=record["completion"],
        finish_reason=record["finish_reason"],
        weight_version=record["weight_version"],
        greedy=record["greedy"],
        view=record.get("view") or "",
        recalled=bool(record.get("recalled")),
        **episode_of(record, media),
    )
    return RecordedRollout(rollout, record["rewards"], record["valid"], record["greedy"], where)
