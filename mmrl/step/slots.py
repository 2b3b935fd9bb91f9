"""The batches that are sampled and not yet learned from, and the places in the rows between them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.rollout.batch import SampledStep
from mmrl.rollout.records import group_records, read_groups
from mmrl.rollout.records.carried import FINISHED, UNFINISHED
from mmrl.step.source import Left
from mmrl.system.clock import Clock

REACHED = "rows_reached"
"""The key of a state that only a run has whose rows were not all measured at the start."""
AHEAD = "ahead"
"""The key of a state that only a run has that samples ahead of its learner: its batches, see ``batch_record``."""


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
    """

    found: SampledStep
    clock: Clock
    ready: float = field(default_factory=time.perf_counter)


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
        """The part that not every run has: ``REACHED`` and ``AHEAD``, as JSON can hold it."""
        rows = {} if self.place.rows is None else {REACHED: self.place.rows}
        return {**rows, AHEAD: list(map(batch_record, self.batches))} if self.batches else rows

    @classmethod
    def of(cls, state: Mapping[str, Any], media: Path) -> Kept:
        """The object that a trainer's state has.

        Args:
            media: The folder of the groups' images.
        """
        place = Place(int(state["consumed_prompts"]), state.get(REACHED), Left.of(state, media))
        return cls(place, [read_batch(record, media) for record in state.get(AHEAD, ())])


def batch_record(found: SampledStep) -> dict[str, Any]:
    """A batch as JSON can hold it: its groups, those of earlier steps that it learns from, and which these are."""
    assert found.fault is None, "a batch with a fault ends the run"
    places = {id(group): place for place, group in enumerate(found.groups)}
    others = [group for group in found.learned if id(group) not in places]
    places |= {id(group): len(found.groups) + place for place, group in enumerate(others)}
    return {
        "step": found.step,
        "weight_version": found.weight_version,
        "stats": dict(found.stats),
        "groups": group_records(found.groups),
        "others": group_records(others),
        "learned": [places[id(group)] for group in found.learned],
    }


def read_batch(record: Mapping[str, Any], media: Path) -> SampledStep:
    """The batch of such a record; experts of the sampler are not in it."""
    groups, others = (read_groups(record[name], media) for name in ("groups", "others"))
    both = [*groups, *others]
    stats = {name: math.nan if value is None else value for name, value in record["stats"].items()}
    learned = [both[place] for place in record["learned"]]
    return SampledStep(int(record["step"]), int(record["weight_version"]), groups, stats, learned)


def kept_records(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The records of all groups in a trainer's state."""
    yield from state[FINISHED]
    yield from state.get(UNFINISHED, ())
    for batch in state.get(AHEAD, ()):
        yield from batch["groups"]
        yield from batch["others"]
