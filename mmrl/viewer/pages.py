"""The documents that the page shows, by resource: the one table that the server and the report share.

A resource is a path such as ``run/0/step/12/group/3``. Its document is plain JSON: NaN and infinity are null, secrets
are redacted. Texts are as they were recorded, control characters and all: the page makes those visible, and enters
every text as text. What cannot be read is ``{"problem": a sentence}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.errors import MMRLError
from mmrl.runs.directory import read_ledger, read_metrics
from mmrl.runs.files import read_records, read_records_back
from mmrl.system.redaction import Redactor
from mmrl.viewer.documents import Document, NotThere, dotted
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document
from mmrl.viewer.steps import evaluations_document, prompt_document, search, step_document

_EVENTS = 5000
"""The last events that a page gets."""
_KIND = "(step|evaluation|blank)"


def run_document(run: ViewedRun) -> Document:
    """The run at a glance, and all that does not change with a step."""
    found = run.run
    config = run.config
    return {
        "name": run.name,
        "path": str(run.path),
        "live": found.is_live,
        "problem": run.problem,
        "last_step": next((each["step"] for each in read_records_back(run.path / "metrics.jsonl")), 0),
        "steps": list(run.files("step")),
        "evaluations": list(run.files("evaluation")),
        "blanks": list(run.files("blank")),
        "checkpoints": [each.step for each in found.checkpoints],
        "attempts": _attempts(run.path),
        "config": dict(dotted(config)) if config else {},
        "origins": _json(run.path / "origins.json"),
        "environment": _json(run.path / "environment.json"),
        "algorithm": (config.get("algorithm") or {}).get("name"),
        "accuracy": run.accuracy,
        "tokens": run.vocabulary.problem,
    }


def _attempts(run: Path) -> Document:
    found: dict[int, dict[str, Any]] = {}
    for record in read_records(run / "attempts.jsonl"):
        attempt = found.setdefault(record["attempt"], {"number": record["attempt"], "changes": []})
        if "exit_code" in record:
            attempt |= {"end": record["time"], "exit": record["exit_code"], "message": record.get("message", "")}
        else:
            attempt |= {
                "begin": record["time"],
                "from_step": record.get("resumed_from"),
                "changes": record.get("changes") or [],
                "end": None,
                "exit": None,
                "message": "",
            }
    return list(found.values())


def _json(file: Path) -> Document:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}


def metrics_document(run: ViewedRun) -> Document:
    """Every metric as a curve over the steps."""

    def read() -> Document:
        steps = read_metrics(run.path)
        names = dict.fromkeys(name for values in steps.values() for name in values)
        curves = {name: [values.get(name) for values in steps.values()] for name in names}
        return {"steps": list(steps), "curves": curves}

    return run.kept("metrics", run.path / "metrics.jsonl", read, of=1)


def events_document(run: ViewedRun) -> Document:
    """The last events, the newest at the end."""
    return list(islice(read_records_back(run.path / "events.jsonl"), _EVENTS))[::-1]


def ledger_document(run: ViewedRun) -> Document:
    """The number of samples of each optimizer step that the newest weights have learned from."""
    return [
        {"step": each["step"], "update": each["update"], "samples": len(each["samples"])}
        for each in read_ledger(run.path)
    ]


Query = Mapping[str, str]
_DOCUMENTS: Sequence[tuple[re.Pattern[str], Callable[..., Document]]] = [
    (re.compile(pattern), make)
    for pattern, make in (
        ("", lambda run, query: run_document(run)),
        ("/metrics", lambda run, query: metrics_document(run)),
        ("/events", lambda run, query: events_document(run)),
        ("/ledger", lambda run, query: ledger_document(run)),
        ("/evaluations", lambda run, query: evaluations_document(run)),
        ("/prompt", lambda run, query: prompt_document(run, query.get("id", ""))),
        (rf"/{_KIND}/(\d+)", lambda run, query, kind, step: step_document(run, kind, int(step))),
        (
            rf"/{_KIND}/(\d+)/search",
            lambda run, query, kind, step: search(run, kind, int(step), query.get("q", "")),
        ),
        (
            rf"/{_KIND}/(\d+)/group/(\d+)",
            lambda run, query, kind, step, group: group_document(run, kind, int(step), int(group)),
        ),
    )
]
"""What follows ``run/N``, and the function of its document."""


class Pages:
    """The documents of some runs."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = [ViewedRun(path) for path in runs]

    def document(self, resource: str, query: Query | None = None) -> Document:
        """The document of a resource.

        Raises:
            NotThere: There is no such resource.
        """
        try:
            found = self._found(resource, query or {})
        except NotThere:
            raise
        except MMRLError as error:
            found = {"problem": str(error)}
        return Redactor().plain(found)

    def run(self, number: str) -> ViewedRun:
        """The run of this number on the command line, from 0.

        Raises:
            NotThere: There is none.
        """
        if not number.isdecimal() or int(number) >= len(self.runs):
            raise NotThere(f"there is no run {number}", possible=f"0 to {len(self.runs) - 1}")
        return self.runs[int(number)]

    def _found(self, resource: str, query: Query) -> Document:
        if resource == "runs":
            return [
                {"run": number, "name": run.name, "path": str(run.path), "problem": run.problem}
                for number, run in enumerate(self.runs)
            ]
        name, _, rest = resource.partition("/")
        number, slash, rest = rest.partition("/")
        for pattern, make in _DOCUMENTS:
            if name == "run" and (found := pattern.fullmatch(slash + rest)):
                return make(self.run(number), query, *found.groups())
        raise NotThere(f"there is nothing at {resource}")
