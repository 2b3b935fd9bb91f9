"""The time that a run has left, estimated from the seconds of its finished steps; pure functions.

    left = sum over steps, evaluations and checkpoints of: how many are still to come x the usual seconds of one

The usual seconds are the mean of the middle half of the last ones. Like the median, that follows a change and is not
moved by a single long step; unlike it, it is right where steps alternate between two lengths, as with groups that are
sampled again. Evaluations and checkpoints are known apart, since most steps have none and the last one has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT = 24
"""Steps, evaluations or checkpoints whose seconds count; those before them may have been of another length."""
Timed = tuple[int, float]
"""An attempt, which runs on one set of ranks, and the seconds of something that it did."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one kind that a run has done, and has still to do.

    Attributes:
        timed: The work that is done, the newest last.
        due: How often it is still to be done.
        warm_up: How many of the first ones of an attempt are slower: kernels are made, memory grows.
    """

    timed: Sequence[Timed]
    due: int
    warm_up: int = 1


def seconds_left(steps: Work, *others: Work) -> float | None:
    """The seconds that all that is due will take; None if no step was timed yet.

    Args:
        others: They count nothing as long as none of their kind was timed.
    """
    if not steps.timed:
        return None
    return sum(work.due * usual(work.timed, work.warm_up) for work in (steps, *others) if work.timed)


def usual(timed: Sequence[Timed], warm_up: int = 1) -> float:
    """The usual seconds of one or more.

    The first ones of an attempt, ``warm_up`` of them, count only while there are no others, of this attempt or an
    earlier one. An earlier attempt, which may have had another machine, counts until the newest one has some that are
    warm.
    """
    warm, attempt, place = list[Timed](), None, 0
    for each in timed:
        attempt, place = each[0], place + 1 if each[0] == attempt else 1
        if place > warm_up:
            warm.append(each)
    if not warm:
        return timed[-1][1]
    return middle([seconds for attempt, seconds in warm if attempt == warm[-1][0]][-RECENT:])


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half of some values: a quarter of them, rounded down, is left out at each end."""
    cut = len(values) // 4
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def step_seconds(line: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """The seconds of a step without its evaluation and checkpoint; None if the line tells of none, as for step 0.

    A step took the time since the line before it. The first line of an attempt has none before it, and the clock may
    have been set back: ``perf/step_s``, which leaves out what comes between two steps, is the least that it took.

    Args:
        line: The step's, as metrics.jsonl has it.
        before: The line before it; None if there is none.
    """
    least: float | None = line.get("perf/step_s")
    if least is None or before is None or before.get("attempt", 0) != line.get("attempt", 0):
        return least
    beside = (line.get("perf/eval_s") or 0.0) + (line.get("perf/save_s") or 0.0)
    return max(least, float(line["time"]) - float(before["time"]) - beside)


def times_due(every: int, after: int, last: int) -> int:
    """How often something is due after the step ``after`` that comes every so many steps, and at the last one.

    Args:
        every: 0 is at the last one alone.
    """
    if after >= last:
        return 0
    return last // every - after // every + (last % every > 0) if every else 1
