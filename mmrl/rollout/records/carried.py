"""Groups that a checkpoint carries to the next step, finished or not, as JSON can hold them.

Finished ones are records as ``group_records`` has them. An unfinished one is such records too, of what is sampled of
its rollouts, with a few fields more. Runs whose rollouts are sampled in parts carry many tokens, so their numbers are
the base64 of the arrays' bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.rollout.kept import Kept, alone, kept_of
from mmrl.rollout.records.lines import group_records
from mmrl.rollout.records.reading import read_groups
from mmrl.rollout.unfinished import CarriedGroup, UnfinishedGroup
from mmrl.token_columns import COLUMNS
from mmrl.types import ScoredGroup

FINISHED, UNFINISHED, EXPERIENCE = "carried_groups", "unfinished_groups", "experience"
"""The keys of a state; the second one is that of rollouts that are sampled in parts, and the third one that of rollouts
that are kept of prompts."""
_PACKED = {"prompt_token_ids": "<i4", "token_ids": "<i4", "mask": "|b1", "token_rewards": "<f8"}
_PACKED |= {column.record: np.dtype(column.dtype).str for column in COLUMNS if column.known == "sampled"}
"""Fields with a number for each token, and the numbers' types."""


def carried_records(groups: Sequence[CarriedGroup], *, in_parts: bool) -> dict[str, list[dict[str, Any]]]:
    """Records of groups for the next step, whose ``group`` is their place among all of them.

    Args:
        in_parts: True for rollouts that are sampled in parts.
    """
    if not in_parts:
        return {FINISHED: group_records([_finished(group) for group in groups])}
    found: dict[str, list[dict[str, Any]]] = {FINISHED: [], UNFINISHED: []}
    for place, group in enumerate(groups):
        if isinstance(group, ScoredGroup):
            key, records = FINISHED, group_records([group], _packed)
        else:
            key, records = UNFINISHED, _unfinished_records(group)
        found[key] += [{**record, "group": place} for record in records]
    return found


def read_carried(state: Mapping[str, Any], media: Path) -> list[CarriedGroup]:
    """The groups of such records, in their order; no unfinished one has its row.

    Args:
        media: The folder of their images.
    """
    finished = list(map(_unpacked, state[FINISHED]))
    places = dict.fromkeys(record["group"] for record in finished)
    found: dict[int, CarriedGroup] = dict(zip(places, read_groups(finished, media), strict=True))
    for place, members in groupby(map(_unpacked, state.get(UNFINISHED, ())), lambda record: record["group"]):
        found[place] = _read_unfinished(list(members), media)
    return [found[place] for place in sorted(found)]


def experience_records(kept: Kept) -> dict[str, list[dict[str, Any]]]:
    """Records of rollouts that a run keeps of its prompts; nothing without any."""
    groups = [alone(each) for of_prompt in kept.values() for each in of_prompt]
    return {EXPERIENCE: group_records(groups, _packed)} if groups else {}


def read_experience(state: Mapping[str, Any], media: Path) -> Kept:
    """The rollouts of such records.

    Args:
        media: The folder of their images.
    """
    return kept_of(read_groups(map(_unpacked, state.get(EXPERIENCE, ())), media))


def recorded_images(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The images of records, of prompts with their views and of observations; each once."""
    found = (image for record in records for image in _images(record))
    return list({image["hash"]: image for image in found}.values())


def _finished(group: CarriedGroup) -> ScoredGroup:
    assert isinstance(group, ScoredGroup), "only rollouts that are sampled in parts are left unfinished"
    return group


def _unfinished_records(group: UnfinishedGroup) -> list[dict[str, Any]]:
    size = len(group.goes_on)
    unscored = ScoredGroup(group.group, np.zeros(size), np.zeros(size, np.bool_), {})
    members = zip(group_records([unscored], _packed), group.goes_on, group.observations, strict=True)
    return [
        {**record, "goes_on": goes_on, "observed": group.observed, "observations": list(observations)}
        for record, goes_on, observations in members
    ]


def _read_unfinished(members: Sequence[Mapping[str, Any]], media: Path) -> UnfinishedGroup:
    (scored,) = read_groups(members, media)
    observed = members[0]["observed"]
    return UnfinishedGroup(
        scored.group,
        tuple(member["goes_on"] for member in members),
        None if observed is None else (observed[0], observed[1]),
        tuple(tuple(member["observations"]) for member in members),
    )


def _packed(field: str, values: Any) -> str:
    return base64.b64encode(np.asarray(values, _PACKED[field]).tobytes()).decode()


def _unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    packed = {name: kind for name, kind in _PACKED.items() if isinstance(record.get(name), str)}
    arrays = {name: np.frombuffer(base64.b64decode(record[name]), kind) for name, kind in packed.items()}
    return {**record, **arrays}


def _images(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from record["images"]
    for part in (*(record.get("views") or ()), *(record.get("segments") or ())):
        yield from part["images"]
    for turn in record.get("episode") or ():
        yield from (part["image"] for part in turn["content"] or () if "image" in part)
