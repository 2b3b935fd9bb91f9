"""The batches that are sampled and not yet learned from, and the places in the rows between them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.rollout.batch import SampledStep
from mmrl.rollout.records import group_records, read_groups
from mmrl.rollout.records.carried import EXPERIENCE, FINISHED, UNFINISHED
from mmrl.step.source import Left
from mmrl.system.clock import Clock

REACHED = "rows_reached"
"""The key of a state that only a run has whose rows were not all measured at the start."""
BATCHES = "batches"
"""The key of a state that only a run has whose sampler is behind: its batches when it is saved, and their files, of
``batch_lines``, when it is read."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run between two batches.

    Attributes:
        position: Prompts taken from the data order so far.
        rows: Facts of the rows that were reached; None if all were measured at the start.
        left: The groups that are left for the next batch.
    """

    position: int = 0
    rows: Sequence[Any] | None = None
    left: Left = field(default_factory=Left)


@dataclass(frozen=True, slots=True)
class Slot:
    """A batch that is gathered.

    Attributes:
        clock: Has the phases of its gathering.
        ready: The time of its end, in seconds of ``time.perf_counter``.
        version: That of the weights which it was to be sampled with; None if it is from a checkpoint.
    """

    found: SampledStep
    clock: Clock
    ready: float = field(default_factory=time.perf_counter)
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a checkpoint keeps of a queue.

    Attributes:
        place: The place after the last of the batches.
        batches: Those that no step has learned from.
    """

    place: Place
    batches: Sequence[SampledStep] = ()

    def rest(self) -> dict[str, Any]:
        """The part that not every run has: ``REACHED`` and ``BATCHES``."""
        rows = {} if self.place.rows is None else {REACHED: self.place.rows}
        return {**rows, BATCHES: self.batches} if self.batches else rows

    @classmethod
    def of(cls, state: Mapping[str, Any], media: Path) -> Kept:
        """The object that a trainer's state has.

        Args:
            media: The folder of the groups' images.
        """
        place = Place(int(state["consumed_prompts"]), state.get(REACHED), Left.of(state, media))
        return cls(place, [read_batch(path, media) for path in state.get(BATCHES, ())])


def batch_lines(found: SampledStep) -> Iterator[dict[str, Any]]:
    """A batch as objects of JSON: what it is, and then a record of each rollout of its groups, and of the groups of
    earlier steps that it learns from."""
    assert found.fault is None, "a batch with a fault ends the run"
    places = {id(group): place for place, group in enumerate(found.groups)}
    others = [group for group in found.learned if id(group) not in places]
    places |= {id(group): len(found.groups) + place for place, group in enumerate(others)}
    yield {
        "step": found.step,
        "weight_version": found.weight_version,
        "stats": dict(found.stats),
        "groups": len(found.groups),
        "learned": [places[id(group)] for group in found.learned],
    }
    for place, group in enumerate([*found.groups, *others]):  # one by one: a batch may have millions of tokens
        yield from ({**record, "group": place} for record in group_records([group]))


def read_batch(path: Path, media: Path) -> SampledStep:
    """The batch of a file of such objects, one in each line; experts of the sampler are not in it."""
    with path.open(encoding="ascii") as lines:
        head = json.loads(next(lines))
        both = read_groups(map(json.loads, lines), media)
    stats = {name: math.nan if value is None else value for name, value in head["stats"].items()}
    learned = [both[place] for place in head["learned"]]
    return SampledStep(head["step"], head["weight_version"], both[: head["groups"]], stats, learned)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of rollouts in a batch's file."""
    with path.open(encoding="ascii") as lines:
        next(lines)
        yield from map(json.loads, lines)


def kept_records(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The records of all groups in a trainer's state."""
    yield from state[FINISHED]
    yield from (*state.get(UNFINISHED, ()), *state.get(EXPERIENCE, ()))
    for path in state.get(BATCHES, ()):
        yield from _records(path)
