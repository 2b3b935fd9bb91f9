"""All runs at a glance: state, step, time, the last value of each metric, and the setting that each is a seed of."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrl.runs.standing import standing_of
from mmrl.runs.sweeps import told
from mmrl.system.redaction import REDACTED, leads_to_a_secret, without_secrets
from mmrl.viewer.documents import Document, dotted
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.history import metrics_document, seconds_of
from mmrl.viewer.lines import ATTEMPTS, EVENTS

SEEDS = "trainer.seed", "trainer.run_dir"
"""Keys that runs of one setting may differ in."""
_TOLD_KEYS = 4
"""The most differences that name a setting."""


def overview_document(runs: Sequence[ViewedRun]) -> Document:
    """An entry for each run, and the settings: runs that differ in their seed alone."""
    entries = [_entry(number, run) for number, run in enumerate(runs)]
    return {"runs": entries, "settings": _settings(runs)}


def _entry(number: int, run: ViewedRun) -> Document:
    """The entry of a run in a list; of one that cannot be read, as far as its place in a sweep tells."""
    entry: Document = {"run": number, "state": None, "reason": "", "step": None, "steps": None, "seconds": None}
    entry |= {"seed": run.point.seed if run.point else None, "last": {}, "best": {}, "recorded": []}
    if run.problem is not None:
        return entry | {"state": "waiting" if run.point else None}
    try:
        return entry | _of_run(run)
    except Exception as error:  # of whatever kind: files of a run may be hostile, and must hide no other run
        return entry | {"reason": f"it cannot be understood: {type(error).__name__}: {error}"}


def _of_run(run: ViewedRun) -> Document:
    with run.lock:
        attempts, events, metrics = run.lines(ATTEMPTS)[0], run.lines(EVENTS)[0], metrics_document(run)
        found, trainer = standing_of(attempts, events, is_live=run.run.is_live), run.section("trainer")
        return {
            "state": found.state,
            "reason": found.reason,
            "seed": run.point.seed if run.point else trainer.get("seed"),
            "step": max(metrics["steps"], default=None),
            "steps": trainer.get("steps"),
            "seconds": seconds_of(run),
            "last": {name: _last(curve) for name, curve in metrics["curves"].items()},
            "best": _best(metrics["curves"], trainer.get("best_metric"), is_min=trainer.get("best_is") == "min"),
            "recorded": [len(attempts), len(events), *(len(run.files(kind)) for kind in run.kinds)],
        }


def _last(curve: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(curve) if value is not None), None)


def _best(curves: Mapping[str, Sequence[float | None]], name: Any, *, is_min: bool) -> dict[str, float]:
    """The best value of ``trainer.best_metric``; empty without one."""
    curve = curves.get(name, ()) if isinstance(name, str) else ()
    values = [value for value in curve if value is not None and math.isfinite(value)]
    return {name: (min if is_min else max)(values)} if values else {}


def _settings(runs: Sequence[ViewedRun]) -> Document:
    """The settings in the order of their first runs; each run is in one."""
    members, configs = defaultdict[Any, list[int]](list), dict[Any, Mapping[str, Any]]()
    for number, run in enumerate(runs):
        config = _comparable(run)
        if run.point is not None:
            key: Any = str(run.point.sweep), json.dumps(run.point.values, sort_keys=True, default=repr)
        else:
            key = json.dumps(config, sort_keys=True, default=repr) if config else number
            configs[key] = config
        members[key].append(number)
    differing = _differing(configs.values())
    sweeps = {run.point.sweep for run in runs if run.point is not None}
    return [
        _setting([runs[number] for number in numbers], numbers, configs.get(key, {}), differing, len(sweeps) > 1)
        for key, numbers in members.items()
    ]


def _setting(
    of: Sequence[ViewedRun],
    numbers: Sequence[int],
    config: Mapping[str, Any],
    differing: Sequence[str],
    tell_sweep: bool,
) -> Document:
    """A setting as the page gets it: its name, the values that tell it from others, and its runs."""
    first = of[0]
    if first.point is not None:
        values = {
            key: REDACTED if leads_to_a_secret(key.split(".")) else without_secrets(value)
            for key, value in first.point.values.items()
        }
        name = " ".join(filter(None, [f"{first.point.sweep.name}:" * tell_sweep, told(values)]))
        return {"name": name or first.point.sweep.name, "values": values, "runs": list(numbers)}
    values = {key: config.get(key) for key in differing}
    others = f" and {len(of) - 1} more" if len(of) > 1 else ""
    name = told(values) if others and values else first.name + others
    return {"name": name, "values": values, "runs": list(numbers)}


def _comparable(run: ViewedRun) -> Mapping[str, Any]:
    """The config by dotted keys, without those that runs of one setting may differ in."""
    return {key: value for key, value in dotted(without_secrets(run.config)) if key and key not in SEEDS}


def _differing(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys whose values tell configs apart; none if they are many."""
    known = list(configs)
    keys = dict.fromkeys(key for config in known for key in config)
    texts = {key: {json.dumps(config.get(key), sort_keys=True, default=repr) for config in known} for key in keys}
    found = [key for key, values in texts.items() if len(values) > 1]
    return found if len(found) <= _TOLD_KEYS else []
