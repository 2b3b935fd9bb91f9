"""Documents of a run's history: attempts, metrics, events, ledger. A damaged line hides no other and is told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mmrl.runs.history import metrics_that_count, read_ledger, undone_by
from mmrl.runs.origins import ORIGINS
from mmrl.system.redaction import REDACTED, keeps_a_secret, leads_to_a_secret, without_secrets
from mmrl.viewer.contained import open_contained, read_object, read_records
from mmrl.viewer.documents import Document, dotted
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.lines import ATTEMPTS, EVENTS, FITS, METRICS

_EVENTS = 5000
"""The last events that a page gets."""
_NAMES = 2000
"""Metrics that a page gets."""
_PAIR = re.compile(r"(?P<key>(?<![\w-])[\w-]+)(?P<colon>['\"]?:\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^,}\]]+)")


def run_document(run: ViewedRun) -> Document:
    """The run at a glance, and all that does not change with a step."""
    if run.problem is not None:
        return {"problem": run.problem}
    found, config = run.run, run.config
    metrics = metrics_document(run)
    attempts, damaged = run.lines(ATTEMPTS)
    (origins, of_origins), (environment, of_environment) = (
        read_object(run.path, run.path / name) for name in (ORIGINS, "environment.json")
    )
    problems = [damaged, run.lines(EVENTS)[1], metrics["problem"] or ""]
    problems += [run.config_problem or "", of_origins, of_environment]
    return {
        "name": run.name,
        "path": run.shown_path,
        "live": found.is_live,
        "problem": "; ".join(filter(None, problems)) or None,
        "last_step": max(metrics["steps"], default=0),
        "steps": list(run.files("step")),
        "evaluations": list(run.files("evaluation")),
        "blanks": list(run.files("blank")),
        "named": {kind: list(run.files(kind)) for kind in run.kinds if "." in kind},
        "checkpoints": [each.step for each in found.checkpoints],
        "attempts": _attempts(attempts),
        "num_events": len(run.lines(EVENTS)[0]),
        "config": dict(dotted(without_secrets(config))) if config else {},
        "origins": {key: _origin(key, str(value)) for key, value in origins.items()},
        "environment": without_secrets(environment),
        "algorithm": run.section("algorithm").get("name"),
        "accuracy": run.accuracy,
        "tokens": run.vocabulary.problem,
    }


def metrics_document(run: ViewedRun) -> Document:
    """Every metric as a curve over the steps that count."""
    found: Document = _metrics(run)[0]
    return found


def seconds_of(run: ViewedRun) -> float | None:
    """The seconds that its attempts took; one without an end lasts until its last step. None without an attempt."""
    attempts, last = _attempts(run.lines(ATTEMPTS)[0]), _metrics(run)[1]
    took = [(each["end"] or max(last, each["begin"])) - each["begin"] for each in attempts if each["begin"] is not None]
    return sum(took) if took else None


def _metrics(run: ViewedRun) -> tuple[Document, float]:
    """The document of the metrics, and the time at which the last line was written."""
    attempts, _ = run.lines(ATTEMPTS)

    def read() -> tuple[Document, float]:
        lines, problem = read_records(run.path, run.path / METRICS, FITS[METRICS])
        steps = metrics_that_count(attempts, lines)
        names, left_out = _names_of(steps)
        curves = {name: [values.get(name) for values in steps.values()] for name in names}
        problems = "; ".join(filter(None, [problem, left_out])) or None
        times = [time for each in lines if isinstance(time := each.get("time"), int | float)]
        return {"steps": list(steps), "curves": curves, "problem": problems}, max(times, default=0.0)

    return run.kept(("metrics", len(attempts)), run.path / METRICS, read)


def _names_of(steps: Mapping[int, Mapping[str, float]]) -> tuple[list[str], str]:
    """The metrics that most steps have, and a sentence about the others."""
    counts = Counter(name for values in steps.values() for name in values)
    if len(counts) <= _NAMES:
        return list(counts), ""
    shown = {name for name, _ in counts.most_common(_NAMES)}
    what = f"{METRICS} has {len(counts)} metrics: the {_NAMES} that most steps have are shown"
    return [name for name in counts if name in shown], what


def events_document(run: ViewedRun) -> Document:
    """The last events, the newest at the end; ``undone`` is true if a later attempt has undone the event's step."""
    attempts, _ = run.lines(ATTEMPTS)
    return [
        {**event, "undone": True}
        if isinstance(step := event.get("step"), int) and undone_by(attempts, step, event["time"])
        else event
        for event in run.lines(EVENTS)[0][-_EVENTS:]
    ]


def ledger_document(run: ViewedRun) -> Document:
    """The number of samples of each optimizer step that the newest weights have learned from."""

    def read() -> Document:
        with suppress(FileNotFoundError):
            open_contained(run.path, run.path / "ledger.jsonl").close()
        return [
            {"step": each["step"], "update": each["update"], "samples": len(each["samples"])}
            for each in read_ledger(run.path)
        ]

    return run.kept("ledger", run.path / "ledger.jsonl", read, of=1)


def _attempts(records: list[dict[str, Any]]) -> Document:
    found: dict[int, dict[str, Any]] = {}
    nothing: dict[str, Any] = dict.fromkeys(("begin", "end", "from_step", "exit"))
    nothing |= {"message": "", "changes": []}
    for record in records:
        attempt = found.setdefault(record["attempt"], {"number": record["attempt"], **nothing})
        if "exit_code" in record:
            attempt |= {"end": record["time"], "exit": record["exit_code"], "message": record.get("message", "")}
        else:
            changes = list(map(_change, record.get("changes") or []))
            attempt |= {"begin": record["time"], "from_step": record.get("resumed_from"), "changes": changes}
    return list(found.values())


def _change(text: str) -> str:
    """A change of the config without secrets: ``KEY: BEFORE -> NOW``, where the values may be mappings."""
    key, colon, rest = text.partition(": ")
    return key + colon + (REDACTED if colon and leads_to_a_secret(key.split(".")) else _PAIR.sub(_pair, rest))


def _origin(key: str, text: str) -> str:
    """The origin of a value without secrets: an override has the value in it."""
    given, equals, value = text.partition("=")
    return given + equals + (REDACTED if equals and leads_to_a_secret(key.split(".")) else _PAIR.sub(_pair, value))


def _pair(found: re.Match[str]) -> str:
    return found["key"] + found["colon"] + (REDACTED if keeps_a_secret(found["key"]) else found["value"])
