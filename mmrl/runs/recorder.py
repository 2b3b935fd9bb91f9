"""The records of a run (metrics, rollouts, ledger, checkpoints) in its folder, the trackers and the console."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, Learner, NetworkFiles
from mmrl.ops.alarms import Looked
from mmrl.plugin_host import registry
from mmrl.plugin_host.used import used_plugins
from mmrl.rollout.batch import sampled_and_given
from mmrl.runs.checkpoints import Checkpoints, write_json, write_lines
from mmrl.runs.directory import RunDirectory
from mmrl.runs.monitoring import Monitoring, StepGroups, fault_of, used_monitors
from mmrl.runs.pace import Pace
from mmrl.runs.resumption import plain_config
from mmrl.runs.tracking import Trackers, shown
from mmrl.step.slots import BATCHES, batch_lines
from mmrl.system.background import Background
from mmrl.system.console import Console
from mmrl.system.redaction import Redactor
from mmrl.system.version import __version__
from mmrl.types import CreditedGroup

RUN_STATE = "run.json"
"""The driver's part of a checkpoint's state."""
BATCH_STATES = "batch-{:06d}.jsonl"
"""Files of the batches that no step has learned from, each by its step, beside ``RUN_STATE``."""


class RunRecorder:
    """Implements ``loop.Recorder``: the run's folder, the trackers and the console."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        trackers: Trackers,
        console: Console,
        engine: Engine,
        fingerprints: Mapping[str, str],
    ) -> None:
        self._config, self._directory, self._trackers = config, directory, trackers
        self._console, self._engine, self._fingerprints = console, engine, fingerprints
        self._checkpoints = Checkpoints(directory.checkpoints)
        self._has_warned = self._knows_grades = False
        self._writer = Background("mmrl-rollouts")
        self._monitoring = Monitoring(config, directory.path, self._monitor_fault)
        self._groups = StepGroups()
        self._pace = Pace.of(directory.path, config.model_dump(mode="json"))

    @cached_property
    def _scores(self) -> dict[int, float]:
        """Scores of the steps that count, without steps that were undone when the run went on from a checkpoint."""
        resumed_from = self._directory.resumed_from
        return best_scores(self._config, self._directory, -1 if resumed_from is None else resumed_from)

    def look(self, step: int, values: Mapping[str, float]) -> Looked:
        begin, groups, self._groups = time.perf_counter(), self._groups, StepGroups()
        if groups.evaluated and (count := self._config.trainer.tracked_rollouts):
            self._trackers.evaluation(step, shown(groups.evaluated, groups.sampled, count))
        if not self._monitoring:
            return Looked()
        found = self._monitoring.look(step, values, groups)
        for alarm in found.alarms:  # before the step is logged: a run that is killed in between tells it again
            self._directory.event("alarm", step=step, monitor=alarm.monitor, message=alarm.message, values=alarm.values)
            self._console.line(f"alarm: {alarm.monitor}, step {step}: {alarm.message}")
            self._trackers.alarm(step, alarm.monitor, alarm.message)
        return Looked({**found.metrics, "perf/monitor_s": time.perf_counter() - begin}, found.alarms)

    def _monitor_fault(self, label: str, error: Exception) -> None:
        self.event("monitor", message=fault_of(label, error), details=getattr(error, "details", ""))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        values = {**values, "perf/memory_bytes_max": float(self._engine.memory_bytes_max())}
        self._pace.note(self._directory.append_metrics(step, values))
        self._trackers.log(step, values)
        self._console.step(step, values, self._pace.seconds_left(step))
        self._warn_of_grades(values)
        if (name := self._config.trainer.best_metric) is None:
            return
        if name in values:  # its checkpoint was written before its evaluation
            if math.isfinite(values[name]):
                self._scores[step] = values[name]
            prune(self._config, self._directory, self._scores)
        elif step > 1 and not self._scores and not self._has_warned:
            self._has_warned = True
            self.event("warning", message=f"trainer.best_metric: {name} is in no step so far, so none is the best one")

    def _warn_of_grades(self, values: Mapping[str, float]) -> None:
        """Say once that a decision waits for the share of value 1 where the reward is graded."""
        trainer = self._config.trainer
        decided = {"trainer.best_metric": trainer.best_metric}
        decided["trainer.stop_when"] = trainer.stop_condition.metric if trainer.stop_condition else None
        for found in self._config.evaluations.values():
            share, mean = found.accuracy_metric, found.mean_metric
            keys = [key for key, name in decided.items() if name == share]
            if not keys or self._knows_grades or mean is None or mean not in values or share not in values:
                continue
            if values[mean] == values[share]:
                continue
            self._knows_grades = True
            what = f"{' and '.join(keys)}: {share} is the share of completions whose {found.accuracy} is 1"
            self.event("warning", message=f"{what}; values between 0 and 1 occur, whose mean is {mean}")

    def rollouts(self, step: int, groups: Sequence[CreditedGroup], state: Mapping[str, Any]) -> None:
        self._groups.sampled, self._groups.given = sampled_and_given(groups)
        self._writer.start(partial(self._directory.write_rollouts, step, groups, state))

    def evaluation(self, step: int, groups: Sequence[CreditedGroup], *, name: str, blank: bool) -> None:
        (self._groups.blank if blank else self._groups.evaluated)[name] = groups
        self._writer.start(partial(self._directory.write_evaluation, step, groups, name=name, blank=blank))

    def wait_for_rollouts(self) -> None:
        self._writer.wait()

    def trained(self, step: int, update: int, samples: Sequence[tuple[int, str, int]]) -> None:
        self._directory.append_ledger(step, update, samples)

    def save(self, learner: Learner, step: int, values: Mapping[str, float], state: Mapping[str, Any]) -> None:
        batches = state.get(BATCHES, ())
        state = {name: value for name, value in state.items() if name != BATCHES}
        record = {
            "step": step,
            "attempt": self._directory.attempt,
            "mmrl": __version__,
            "metrics": values,
            "trainer": state,
            "trackers": [
                {"name": spec.name, "state": saved}
                for spec, saved in zip(self._config.trackers, self._trackers.states(), strict=True)
            ],
            "config": plain_config(self._config),
            "fingerprints": self._fingerprints,
        }

        def fill(folder: Path) -> Mapping[str, NetworkFiles]:
            roles = learner.save(folder)
            (folder / "state").mkdir(exist_ok=True)
            write_json(folder / "state" / RUN_STATE, Redactor().plain(record))
            for found in batches:
                write_lines(
                    folder / "state" / BATCH_STATES.format(found.step), map(Redactor().plain, batch_lines(found))
                )
            self._directory.sync()
            return roles

        self._checkpoints.write(step, fill)
        prune(self._config, self._directory, self._scores)

    def event(self, kind: str, **fields: Any) -> None:
        tell(self._directory, self._console, kind, **fields)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._console.progress(phase, done, total)


def tell(directory: RunDirectory, console: Console, kind: str, **fields: Any) -> None:
    """Record an event, and print its message."""
    directory.event(kind, **fields)
    console.line(f"{kind}: {fields.get('message', fields)}")


@contextmanager
def tracking(config: Config, directory: RunDirectory, before: Sequence[Mapping[str, Any]]) -> Iterator[Trackers]:
    """The trackers of the config, started, and finished at the end.

    Args:
        before: Name and state of each one that the run had when it was saved.
    """
    trackers = Trackers(
        [registry.create("tracker", spec) for spec in config.trackers],
        lambda message: directory.event("tracker", message=message),
    )
    known = zip_longest((each["name"] for each in before), (each["state"] for each in before), config.trackers)
    states = [state if spec and name == spec.name else {} for name, state, spec in known]
    trackers.start(directory.path, config.model_dump(mode="json"), states)
    try:
        yield trackers
    finally:
        trackers.finish(timeout_s=30)


def best_scores(config: Config, directory: RunDirectory, last: int) -> dict[int, float]:
    """``trainer.best_metric`` of each step up to the last one that counts, as far as metrics.jsonl tells."""
    if (name := config.trainer.best_metric) is None:
        return {}
    values = {step: record.get(name) for step, record in directory.metrics().items() if step <= last}
    return {step: value for step, value in values.items() if value is not None}


def prune(config: Config, directory: RunDirectory, scores: Mapping[int, float]) -> None:
    """Remove the checkpoints and optimizers' states that ``trainer`` does not ask to keep; keep the one of the best
    score."""
    checkpoints = Checkpoints(directory.checkpoints)
    known = [each.step for each in checkpoints.all() if each.step in scores]
    choose = max if config.trainer.best_is == "max" else min
    best = choose(known, key=scores.__getitem__, default=None)  # the earliest of equal ones
    drops = config.trainer.save_optimizer == "last"
    checkpoints.prune(config.trainer.keep_checkpoints, best, drop_optimizers=drops)


def provenance(config: Config, engine: Engine) -> dict[str, Any]:
    """The content of environment.json: versions, machine, command, engine and plugins."""
    return {
        "mmrl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "engine": dict(engine.describe()),
        "plugins": [dataclasses.asdict(info) for info in [*used_plugins(config), *used_monitors(config)]],
    }
