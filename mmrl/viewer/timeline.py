"""The document of what the ranks did when: who sampled, who learned, who waited, step by step.

It follows from each step's line in metrics.jsonl: the time at which the line was written, and the seconds before it.
Ranks that sample and learn in turns have their phases one after the other. Where ranks of their own sample, the groups
of a step were gathered ``perf/gather_s`` long and were ready ``perf/queued_s`` before the learner took them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.runs.history import metrics_that_count
from mmrl.viewer.contained import read_records
from mmrl.viewer.documents import Document
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.lines import ATTEMPTS, FITS, METRICS

STEPS = 200
"""The last steps that a page gets."""
SAMPLER, LEARNER = "sampler", "learner"
_GATHERS = ("prompts", "generate", "score")
"""Phases of a step in which groups are sampled, besides ``sync``."""
_GATHER = "perf/gather_s"
Span = tuple[str, str, float, float]
"""A side, what it does, and the seconds of begin and end since 1970."""


def timeline_document(run: ViewedRun) -> Document:
    """The spans of the last steps that have told their seconds, from the first one's begin on.

    A side waits between its spans. Steps of an earlier attempt are left out.
    """
    attempts, _ = run.lines(ATTEMPTS)

    def read() -> Document:
        lines, _ = read_records(run.path, run.path / METRICS, FITS[METRICS])
        return _document(metrics_that_count(attempts, lines), lines)

    found: Document = run.kept(("timeline", len(attempts)), run.path / METRICS, read)
    return found


def _document(steps: Mapping[int, Mapping[str, float]], lines: Sequence[Mapping[str, Any]]) -> Document:
    """The document of the steps that count, out of all lines."""
    last = max((attempt for each in lines if isinstance(attempt := each.get("attempt"), int)), default=0)
    times = {each["step"]: each.get("time") for each in lines if each.get("attempt", 0) == last}
    found = list[dict[str, Any]]()
    for step, values in steps.items():
        time = times.get(step)
        if step and isinstance(time, int | float) and isinstance(values.get("perf/step_s"), int | float):
            found.append({"step": step, "spans": list(_spans(values, float(time)))})
    found = found[-STEPS:]
    begin = min((start for each in found for _, _, start, _ in each["spans"]), default=0.0)
    for each in found:
        each["spans"] = [(side, kind, start - begin, end - begin) for side, kind, start, end in each["spans"]]
    return {"apart": any(_GATHER in steps[each["step"]] for each in found), "steps": found}


def _spans(values: Mapping[str, Any], time: float) -> Iterator[Span]:
    """A step's spans, of which the last one ends at the time that its line was written."""

    def seconds(name: str) -> float:
        value = values.get(f"perf/{name}_s", 0.0)
        return max(float(value), 0.0) if isinstance(value, int | float) and math.isfinite(value) else 0.0

    end = time - seconds("monitor")
    evaluated = end - seconds("eval")
    saved = evaluated - seconds("save")
    begin = saved - seconds("step")
    sync, gather = seconds("sync"), sum(map(seconds, _GATHERS))
    learned = begin + sync + gather
    if _GATHER in values:
        learned = begin + seconds("publish") + seconds("wait")
        gathered = learned - seconds("queued")
        start = gathered - seconds("gather")
    else:
        gathered, start = learned, begin
    yield from _some(SAMPLER, "sync", start, min(start + sync, gathered))
    yield from _some(SAMPLER, "sample", min(start + sync, gathered), gathered)
    yield from _some(LEARNER, "publish", begin, min(begin + seconds("publish"), learned))
    yield from _some(LEARNER, "learn", learned, saved)
    yield from _some(LEARNER, "save", saved, evaluated)
    yield from _some(SAMPLER, "evaluate", evaluated, end)


def _some(side: str, kind: str, begin: float, end: float) -> Iterator[Span]:
    if end > begin:
        yield side, kind, begin, end
