"""The state of a run, as its folder tells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmrl.runs.files import read_records

State = Literal["waiting", "running", "done", "stopped", "failed"]
_BY_SIGNAL = 10, 130
"""Exit codes of runs that a signal, Ctrl-C among them, has ended, and that go on."""


class Standing(NamedTuple):
    """The state of a run.

    ``waiting`` has not begun, ``stopped`` was ended by a signal, a program or a kill and goes on, ``failed`` ended with
    an error.
    """

    state: State
    reason: str = ""
    """The reason why it stopped or failed, as far as the folder tells."""


def standing(run: Path, *, is_live: bool) -> Standing:
    """The state of a run.

    Args:
        is_live: True if a process is at work on it.

    Raises:
        DataError: attempts.jsonl or events.jsonl is damaged.
    """
    attempts, events = (read_records(run / name) for name in ("attempts.jsonl", "events.jsonl"))
    return standing_of(attempts, events, is_live=is_live)


def standing_of(
    attempts: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], *, is_live: bool
) -> Standing:
    """As ``standing``, of the lines of attempts.jsonl and events.jsonl."""
    if is_live:
        return Standing("running")
    tried = list(_attempts(attempts))
    if tried and tried[-1][1].state == "done":
        return tried[-1][1]
    found = [*tried, *_events(events)]  # an error before the first attempt is only an event
    return sorted(found, key=lambda each: each[0])[-1][1] if found else Standing("waiting")


def _attempts(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Standing]]:
    """The time of each beginning and end of an attempt, and what the run was then taken for."""
    for record in records:
        code, message = record.get("exit_code"), str(record.get("message") or "")
        if code is None:
            yield _time(record), Standing("stopped", "it was killed")
        elif code == 0 and not message:
            yield _time(record), Standing("done")
        else:
            yield _time(record), Standing("stopped" if code in (0, *_BY_SIGNAL) else "failed", message)


def _events(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, Standing]]:
    for record in records:
        if record.get("kind") in ("error", "stopped"):
            state: State = "failed" if record["kind"] == "error" else "stopped"
            yield _time(record), Standing(state, str(record.get("message") or ""))


def _time(record: Mapping[str, Any]) -> float:
    time = record.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
