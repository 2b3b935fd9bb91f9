"""A training run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl import __version__, registry
from mmrl.checkpoints import Checkpoint, CheckpointError, Checkpoints, find, write_json
from mmrl.config import Config, to_yaml
from mmrl.console import Console
from mmrl.errors import ConfigError, DeviceMemoryError, MMRLError, RankLostError
from mmrl.interfaces import Engine, Learner
from mmrl.interruption import Interruption, Stopped, end_process
from mmrl.plan import RunPlan
from mmrl.redaction import Redactor
from mmrl.resumption import Change, changed_config, changed_fingerprints, fingerprints, plain_config, refuse
from mmrl.rollout_records import rollout_records
from mmrl.run_directory import RunDirectory
from mmrl.scoring.scorer import Scorer
from mmrl.tracking import Trackers
from mmrl.types import CreditedGroup
from mmrl.watchdog import Watchdog

if TYPE_CHECKING:
    from mmrl.collection import Collector

RUN_STATE = "run.json"
"""The driver's part of a checkpoint's state."""


class RunRecorder:
    """Implements ``trainer.Recorder``: the run's folder, the trackers and the console."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        trackers: Trackers,
        console: Console,
        engine: Engine,
        prints: Mapping[str, str],
    ) -> None:
        self._config, self._directory, self._trackers = config, directory, trackers
        self._console, self._engine, self._fingerprints = console, engine, prints
        self._checkpoints = Checkpoints(directory.checkpoints)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        values = {**values, "perf/memory_bytes_max": float(self._engine.memory_bytes_max())}
        self._directory.append_metrics(step, values)
        self._trackers.log(step, values)
        self._console.step(step, values)
        if self._config.trainer.best_metric in values:  # which the checkpoint of the step came before
            _prune(self._config, self._directory)

    def rollouts(self, step: int, groups: Sequence[CreditedGroup]) -> None:
        records = (record for index, group in enumerate(groups) for record in rollout_records(index, group))
        self._directory.write_rollouts(step, records)

    def trained(self, step: int, update: int, samples: Sequence[tuple[int, str, int]]) -> None:
        self._directory.append_ledger(step, update, samples)

    def save(self, learner: Learner, step: int, values: Mapping[str, float], state: Mapping[str, Any]) -> None:
        record = {
            "step": step,
            "attempt": self._directory.attempt,
            "mmrl": __version__,
            "metrics": values,
            "trainer": state,
            "trackers": [
                {"name": spec.name, "state": state}
                for spec, state in zip(self._config.trackers, self._trackers.states(), strict=True)
            ],
            "config": plain_config(self._config),
            "fingerprints": self._fingerprints,
        }

        def fill(folder: Path) -> None:
            learner.save(folder)
            write_json(folder / "state" / RUN_STATE, Redactor().plain(record))
            self._directory.sync()

        self._checkpoints.write(step, fill)
        _prune(self._config, self._directory)

    def event(self, kind: str, **fields: Any) -> None:
        self._directory.event(kind, **fields)
        self._console.line(f"{kind}: {fields.get('message', fields)}")

    def progress(self, phase: str, done: int, total: int) -> None:
        self._console.progress(phase, done, total)


class TrainingRun:
    """A run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks."""

    def __init__(self, config: Config, directory: RunDirectory, interruption: Interruption) -> None:
        self._config, self._directory, self._interruption = config, directory, interruption
        self._plan = RunPlan(config, directory.media)
        self._checkpoints = Checkpoints(directory.checkpoints)
        self._console = Console(config.trainer.steps)
        self._checkpoint: Checkpoint | None = None
        self._source: Checkpoint | None = None  # of another run, until this one has a checkpoint of its own
        self._state: Mapping[str, Any] = {}
        self._changes: list[Change] = []
        self._prints: dict[str, str] = {}
        self._is_halved = False

    def find_start(self, resume: str, strict: bool, allowed: Sequence[str]) -> bool:
        """Find the checkpoint to go on from, if any, and whether it may; False if the run is finished.

        Raises:
            CheckpointError: All checkpoints are damaged, or the newest one with ``strict``.
            ConfigError: What has changed since is not allowed.
        """
        self._checkpoints.clean()
        resume = self._own(resume)

        def report(damaged: Checkpoint, error: CheckpointError) -> None:
            if strict:
                error.remedy = "leave out --strict-resume to go on from the checkpoint before it"
                raise error
            self._tell("checkpoint_damaged", message=str(error), step=damaged.step)

        if resume == "auto":
            self._checkpoint = self._checkpoints.newest(report)
        elif resume != "never":
            self._checkpoint = self._source = find(Path(resume), report)
        if self._checkpoint is None:
            return True
        self._load_state()
        self._changes = changed_config(self._state["config"], plain_config(self._config))
        if resume == "auto":
            self._set_aside_later()
            if self._is_unborn() and any(change.matters for change in self._changes):
                self._start_anew()
                return True
            if self._checkpoint.step >= self._config.trainer.steps and self._pending() is None:
                self._console.line(f"{self._directory.path} is finished: it has {self._checkpoint.step} steps")
                _prune(self._config, self._directory)
                return False
        for change in self._changes:
            self._console.line(f"changed: {change}")
        refuse(self._changes, allowed, str(self._checkpoint.path))
        self._prints = fingerprints(self._plan)
        others = changed_fingerprints(self._state["fingerprints"], self._prints)
        refuse(others, allowed, str(self._checkpoint.path))
        self._changes += others
        if resume == "auto":
            _prune(self._config, self._directory)  # what was killed before it did
        return True

    def _own(self, resume: str) -> str:
        """``auto`` for a run that has begun from the path that ``resume`` is.

        Raises:
            ConfigError: The run was to begin from a checkpoint and has not.
        """
        has_begun, source = bool(self._checkpoints.all()), self._directory.source
        if resume == "auto" and source is not None and not has_begun:
            raise ConfigError(
                "the run was to begin from a checkpoint of another one, and ended before it did",
                where=f"trainer.run_dir: {self._directory.path}",
                remedy=f"begin it again with --resume {source}, or choose another trainer.run_dir",
            )
        if resume in ("auto", "never"):
            return resume
        if has_begun:
            return "auto"
        self._directory.start_anew()
        return resume

    def _set_aside_later(self) -> None:
        """Damaged ones, or they would be counted among the newest, which are kept."""
        assert self._checkpoint is not None
        for later in self._checkpoints.all():
            if later.step > self._checkpoint.step:
                self._checkpoints.set_aside(later)

    def train(self) -> None:
        """Train to the end; ranks that are lost or hang are started again from the last checkpoint."""
        config, plan, directory = self._config, self._plan, self._directory
        with ExitStack() as stack:
            stack.callback(self._console.close)
            _ = plan.algorithm
            for warning in plan.warnings:
                self._tell("warning", message=warning)
            # Workers import their rewards while the engine starts.
            scorer = stack.enter_context(Scorer(config.rewards))
            for source in (plan.training, plan.evaluation):
                if source is not None:
                    source.listen(lambda prompt, reason: directory.event("dropped", prompt=prompt, reason=reason))
            self._prints = self._prints or fingerprints(plan)
            for left in range(config.trainer.max_restarts, -1, -1):
                try:
                    self._attempt(scorer)
                    break
                except (RankLostError, DeviceMemoryError) as error:
                    self._interruption.check()  # a signal to all processes of a job is no fault
                    if not left or (isinstance(error, DeviceMemoryError) and not self._halve_microbatches()):
                        raise
                    self._tell("restart", message=str(error), restarts_left=left - 1)
                    self._go_back()

    def _attempt(self, scorer: Scorer) -> None:
        """One engine from its start to its end."""
        from mmrl.cluster.launch import start_engine
        from mmrl.collection import Collector
        from mmrl.trainer import Trainer

        config, plan, directory = self._config, self._plan, self._directory
        checkpoint, source = self._checkpoint, self._source
        step = None if checkpoint is None else checkpoint.step
        directory.begin_attempt(
            step,
            checkpoint=None if checkpoint is None else str(checkpoint.path),
            source=None if source is None else str(source.path),
            command=sys.argv,
            changes=[str(change) for change in self._changes],
        )
        code, message = 1, ""
        try:
            with ExitStack() as stack:
                algorithm = registry.create("algorithm", config.algorithm)
                engine = start_engine(
                    config,
                    plan.folder,
                    plan.media,
                    algorithm,
                    max_images=plan.max_images,
                    with_sampler=plan.with_sampler,
                    checkpoint=None if checkpoint is None else checkpoint.path,
                )
                stack.callback(engine.close)
                self._interruption.renew()  # engines' packages take signals over
                self._interruption.check()
                directory.write_environment(_environment(config, engine))
                directory.write_config(to_yaml(config))
                states = () if source else self._state.get("trackers", ())  # another run is not written on
                trackers = stack.enter_context(_tracking(config, directory, states))
                recorder = RunRecorder(config, directory, trackers, self._console, engine, self._prints)
                collector = Collector(
                    config, engine, plan.encoder, scorer, recorder.progress, plan.penalties, event=recorder.event
                )
                trainer = Trainer(
                    config,
                    algorithm,
                    engine,
                    plan.encoder,
                    collector,
                    plan.training,
                    plan.evaluation,
                    recorder,
                    precision=engine.precision,
                    interruption=self._interruption,
                    watchdog=Watchdog(
                        config.trainer.step_timeout_s, lambda what: self._expire(engine, collector, what)
                    ),
                )
                if checkpoint is None:
                    trainer.fit()
                else:
                    if source is not None:
                        self._inherit(source)
                    self._tell("resumed", message=f"from step {step}, {checkpoint.path}", step=step)
                    trainer.restore(self._state["trainer"], directory.media)
                    trainer.fit(step, self._pending(), is_saved=source is None)
            code = 0
        except (MMRLError, Stopped) as error:
            code, message = error.exit_code, str(error)
            raise
        finally:
            directory.end_attempt(code, message)

    def _halve_microbatches(self) -> bool:
        """Once, for ranks that cannot do it by themselves as others wait for them; whether it was done."""
        learner = self._config.learner
        budget = learner.tokens_per_microbatch // 2
        if self._is_halved or self._config.cluster.ranks == 1 or not budget:
            return False
        smaller = learner.model_copy(update={"tokens_per_microbatch": budget})
        self._config, self._is_halved = self._config.model_copy(update={"learner": smaller}), True
        self._tell("adapted", message=f"out of memory: learner.tokens_per_microbatch is {budget} from now on")
        return True

    def _go_back(self) -> None:
        """To the last checkpoint of this run, or to where it began from."""
        newest = self._checkpoints.newest(
            lambda damaged, error: self._tell("checkpoint_damaged", message=str(error), step=damaged.step)
        )
        self._source = self._source if newest is None else None
        self._checkpoint, self._state = newest or self._source, {}
        if self._checkpoint is not None:
            self._load_state()
            self._set_aside_later()

    def _load_state(self) -> None:
        assert self._checkpoint is not None
        self._state = self._checkpoint.read_state(RUN_STATE)

    def _pending(self) -> Mapping[str, float] | None:
        """What the checkpoint's step came to, if its evaluation or its line in metrics.jsonl is missing."""
        assert self._checkpoint is not None
        step, config = self._checkpoint.step, self._config
        logged = self._directory.metrics().get(step)
        is_due = config.data.eval is not None and config.trainer.evaluates(step)
        is_evaluated = logged is not None and any(name.startswith("eval/") for name in logged)
        if logged is not None and (is_evaluated or not is_due):
            return None
        values: Mapping[str, float | None] = self._state["metrics"] or _metrics_of(logged)
        return {name: math.nan if value is None else value for name, value in values.items()}

    def _is_unborn(self) -> bool:
        """Whether no step was ever finished."""
        assert self._checkpoint is not None
        return self._checkpoint.step == 0 and not any(self._directory.metrics())

    def _start_anew(self) -> None:
        self._tell("start_anew", message="the config has changed, and no step was finished yet")
        self._directory.start_anew()
        self._checkpoint, self._state, self._changes = None, {}, []

    def _inherit(self, checkpoint: Checkpoint) -> None:
        """Take over the history of the run that this one begins from, and the images that it still needs.

        Raises:
            CheckpointError: They are not there.
        """
        source = checkpoint.path.parents[1]
        self._directory.inherit(source, checkpoint.step)
        self._directory.media.mkdir(exist_ok=True)
        hashes = {image["hash"] for record in self._state["trainer"]["carried_groups"] for image in record["images"]}
        for name in (f"{digest}.png" for digest in sorted(hashes)):
            try:
                shutil.copy2(source / "media" / name, self._directory.media)
            except FileNotFoundError as error:
                raise CheckpointError(
                    "an image that the checkpoint needs is not beside it",
                    where=str(source / "media" / name),
                    remedy="begin from a checkpoint within its run's folder",
                ) from error

    def _expire(self, engine: Engine, collector: Collector, what: str) -> None:
        """End what hangs, from the watchdog's thread: the ranks, or this process if it is the only one."""
        latest = ", ".join(group.prompt.id for group in collector.generated[-3:])
        error = RankLostError(
            f"{what} has taken more than {self._config.trainer.step_timeout_s:g} s",
            where=f"trainer.step_timeout_s; the last prompts sampled: {latest or 'none'}",
            remedy="look at what hangs; if nothing does, raise the limit",
        )
        if engine.abandon(error):
            return
        self._tell("error", message=str(error), exit_code=error.exit_code)
        self._directory.end_attempt(error.exit_code, str(error))
        print(f"mmrl: {error}", file=sys.stderr, flush=True)
        end_process(error.exit_code)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._directory.event(kind, **fields)
        self._console.line(f"{kind}: {fields['message']}")


@contextmanager
def _tracking(config: Config, directory: RunDirectory, before: Sequence[Mapping[str, Any]]) -> Iterator[Trackers]:
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


def _prune(config: Config, directory: RunDirectory) -> None:
    """Remove the checkpoints that ``trainer`` does not ask to keep; keep the one that is best as far as is known."""
    checkpoints, best = Checkpoints(directory.checkpoints), None
    if (name := config.trainer.best_metric) is not None:
        logged = directory.metrics()
        values = {each.step: logged[each.step].get(name) for each in checkpoints.all() if each.step in logged}
        known = {step: value for step, value in values.items() if value is not None}
        choose = max if config.trainer.best_is == "max" else min
        best = choose(known, key=known.__getitem__, default=None)  # the earliest of equal ones
    checkpoints.prune(config.trainer.keep_checkpoints, best)


def _metrics_of(record: Mapping[str, Any] | None) -> dict[str, float | None]:
    """A line of metrics.jsonl without what names it."""
    return {name: value for name, value in (record or {}).items() if name not in ("step", "attempt", "time")}


def _environment(config: Config, engine: Engine) -> dict[str, Any]:
    return {
        "mmrl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "engine": dict(engine.describe()),
        "plugins": [dataclasses.asdict(info) for info in registry.used_plugins(config)],
    }
