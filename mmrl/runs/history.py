"""Reading a run's history: metrics, ledger, and the steps that later attempts have undone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.runs.files import read_records, read_records_back

MET = "eval/accuracy", "reward/mean", "loss/total"
"""Metrics that tell how a run went: the first one that it has is shown."""


def read_ledger(run: str | Path, step: int | None = None) -> list[dict[str, Any]]:
    """The samples that the newest weights of a run have learned from: a record of each optimizer step, in order.

    Each has ``step``, ``update`` (counted from 1 through the run), ``attempt`` and ``samples``, a list of (epoch,
    prompt id, member). Optimizer steps whose outcome was lost are left out.

    Args:
        step: For its records alone; the file is then read from its end, back to that step.
    """
    path, found = Path(run) / "ledger.jsonl", list[dict[str, Any]]()
    if step is not None:
        return _ledger_of(path, step)
    for record in read_records(path):
        if "resumed_from" in record:
            found = [each for each in found if each["step"] <= record["resumed_from"]]
        else:
            found.append(record)
    return found


def _ledger_of(path: Path, step: int) -> list[dict[str, Any]]:
    """The records of a step, as ``read_ledger`` answers them."""
    found, last = list[dict[str, Any]](), math.inf  # the last step that later attempts have left as it was
    for record in read_records_back(path):
        if "resumed_from" in record:
            last = min(last, record["resumed_from"])
        elif record["step"] <= last:
            if record["step"] < step:
                break
            found += [record] if record["step"] == step else []
    return found[::-1]


def read_metrics(run: str | Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, in order; of steps that a later attempt has undone only those that it took again.

    A number that was not finite is NaN.

    Raises:
        DataError: A line is not as a run writes it.
    """
    files = [Path(run) / name for name in ("attempts.jsonl", "metrics.jsonl")]
    try:
        return metrics_that_count(*map(read_records, files))
    except (KeyError, TypeError) as error:
        what = f"a line is not as a run writes it: {type(error).__name__}: {error}"
        raise DataError(what, where=" or ".join(map(str, files))) from error


def undone_by(attempts: Iterable[Mapping[str, Any]], step: int, at: float) -> bool:
    """True if a later attempt than that of the time ``at``, in seconds since 1970, has undone the step."""
    return any(at < each["time"] and begin < step for each, begin in _begun(attempts))


def metrics_that_count(
    attempts: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]
) -> dict[int, dict[str, float]]:
    """As ``read_metrics``, of the lines of attempts.jsonl and metrics.jsonl."""
    begun = [(each["attempt"], begin) for each, begin in _begun(attempts)]
    found = {}
    for record in lines:
        attempt, step = record.get("attempt", 0), record["step"]
        if not any(later > attempt and begin < step for later, begin in begun):
            found[step] = finite_or_nan(metrics_of(record))
    return dict(sorted(found.items()))


def _begun(attempts: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The beginning of each attempt, with the last step that it has left as it was; -1 if none."""
    for each in attempts:
        if "resumed_from" in each:
            yield each, -1 if each["resumed_from"] is None else each["resumed_from"]


def finite_or_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics as they were, except infinity, for which JSON has no word: it comes back as NaN."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def metrics_of(record: Mapping[str, Any] | None) -> dict[str, float | None]:
    """A line of metrics.jsonl without the keys that name it."""
    return {name: value for name, value in (record or {}).items() if name not in ("step", "attempt", "time")}
