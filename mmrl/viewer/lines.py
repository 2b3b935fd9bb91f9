"""Lines of a run's history as mmrl writes them: one of another form is left out, since it would hide all the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.runs.history import metrics_of

METRICS, ATTEMPTS, EVENTS = "metrics.jsonl", "attempts.jsonl", "events.jsonl"
_MOST = int(sys.float_info.max)
_Test = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**53


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MOST)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _or_none(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _fits(needs: Mapping[str, _Test], may_have: Mapping[str, _Test]) -> Callable[[dict[str, Any]], bool]:
    tests = {**needs, **may_have}
    return lambda record: (
        needs.keys() <= record.keys() and all(test(record[key]) for key, test in tests.items() if key in record)
    )


_IS_OF_STEP = _fits({"step": _is_whole}, {"attempt": _is_whole})


def _is_metrics(record: dict[str, Any]) -> bool:
    return _IS_OF_STEP(record) and all(map(_or_none(_is_number), metrics_of(record).values()))


FITS: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    METRICS: _is_metrics,
    ATTEMPTS: _fits(
        {"attempt": _is_whole, "time": _is_number},
        {
            "resumed_from": _or_none(_is_whole),
            "folder": _or_none(_is_text),
            "changes": _or_none(_are_texts),
            "exit_code": _or_none(_is_whole),
            "message": _or_none(_is_text),
        },
    ),
    EVENTS: _fits({"time": _is_number, "kind": _is_text}, {}),
}
"""By the file's name: true if a line can be shown."""
