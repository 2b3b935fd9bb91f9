"""A training run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cluster.process import garbage_kept
from mmrl.config.load import to_yaml
from mmrl.config.sections import Config
from mmrl.errors import ConfigError, MMRLError, ResourceError, plural
from mmrl.plugin_host import registry
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.checkpoints import Checkpoint, CheckpointError, Checkpoints, find
from mmrl.runs.directory import RunDirectory
from mmrl.runs.episodes import playing
from mmrl.runs.history import metrics_of
from mmrl.runs.inheritance import inherit
from mmrl.runs.overdue import step_watchdog
from mmrl.runs.recorder import RUN_STATE, RunRecorder, best_scores, environment, prune, tracking
from mmrl.runs.restarts import RESTARTED, Restarts
from mmrl.runs.resumption import Change, changed_config, changed_contents, fingerprints, plain_config, refuse
from mmrl.runs.reward_trial import RewardTrial
from mmrl.runs.scored_rows import row_warnings
from mmrl.runs.setup import RunSetup
from mmrl.runs.summary import closing, opening, shown_metrics, way_on
from mmrl.system.console import Console, diverted
from mmrl.system.profiling import Profiler
from mmrl.system.report import INDENT
from mmrl.system.signals import Interruption, Stopped
from mmrl.training.sources import REACHED

if TYPE_CHECKING:
    from mmrl.engine_api import Engine
    from mmrl.interfaces import Algorithm
    from mmrl.rollout.episodes.player import EpisodePlayer
    from mmrl.training.trainer import Trainer


class TrainingRun:
    """A run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks.

    Args:
        profiled_steps: Steps to write a trace of, in each attempt.
        verbose: True if the engines' libraries write to the console while they start, and not to RUN/engines.log.
        origins: The place where each value of the config was written, by dotted key.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        interruption: Interruption,
        *,
        profiled_steps: int = 0,
        verbose: bool = False,
        origins: Mapping[str, str],
    ) -> None:
        self._length = "trainer.steps" if config.trainer.epochs is None else "trainer.epochs"
        self._written, self._config, self._setup = config, config, RunSetup(config, directory.media)
        self._directory, self._interruption, self._origins = directory, interruption, origins
        self._profiled_steps, self._verbose = profiled_steps, verbose
        self._checkpoints = Checkpoints(directory.checkpoints)
        self._console = Console(self._config.trainer.steps, mean=self._config.accuracy_mean)
        self._checkpoint: Checkpoint | None = None
        self._source: Checkpoint | None = None  # of another run, until this one has a checkpoint of its own
        self._state: Mapping[str, Any] = {}
        self._changes: list[Change] = []
        self._fingerprints: dict[str, str] = {}

    def find_start(self, resume: str, strict: bool, allowed: Sequence[str]) -> bool:
        """Find the checkpoint to go on from, if any, and check that it may; False if the run is finished.

        Raises:
            CheckpointError: All checkpoints are damaged, or the newest one with ``strict``.
            ConfigError: A change since then is not allowed, or steps were finished and no checkpoint is left.
        """
        self._checkpoints.clean()
        resume = self._resolve(resume)

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
            if resume == "auto" and self._directory.has_steps:
                raise ConfigError(
                    "the run has finished steps, and no checkpoint to go on from",
                    where=f"trainer.run_dir: {self._directory.path}",
                    remedy="put a checkpoint back, choose another trainer.run_dir, or move the folder away",
                )
            self._set_up(None)
            return True
        self._load_state()
        self._set_up(REACHED not in self._state["trainer"])
        self._changes = changed_config(self._state["config"], plain_config(self._config))
        if resume == "auto":
            self._set_aside_later()
            if self._has_no_finished_step() and (why := self._why_anew()):
                self._start_anew(why)
                return True
            if self._checkpoint.step >= self._config.trainer.steps and self._unlogged_metrics() is None:
                self._tell_finished()
                self._prune()
                return False
            if self._has_learned_enough():
                self._prune()
                return False
        self._checkpoint.require_optimizer()
        for change in self._changes:
            self._console.line(f"changed: {change}")
        refuse(self._changes, allowed, str(self._checkpoint.path))
        self._fingerprints = fingerprints(self._setup)
        others = changed_contents(self._state["fingerprints"], self._fingerprints)
        self._console.lines([f"changed: {change}" for change in others])
        refuse(others, allowed, str(self._checkpoint.path))
        self._changes += others
        if resume == "auto":
            self._prune()  # a killed process may not have done it
        return True

    def _set_up(self, scans: bool | None) -> None:
        """Begin with the config as it was given, and read training rows as a checkpoint's run does; None for a new run.

        Raises:
            MMRLError: ``trainer.epochs`` is set, and the rows that it counts cannot be used.
        """
        self._setup = RunSetup(self._written, self._directory.media, scans=scans)
        self._config = self._setup.count_steps()
        self._console = Console(self._config.trainer.steps, mean=self._config.accuracy_mean)

    def _resolve(self, resume: str) -> str:
        """``auto`` if the run has already begun from the path ``resume``, else ``resume`` as it is."""
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
        """Set aside later checkpoints, which are damaged, else they would count among the newest that are kept."""
        assert self._checkpoint is not None
        for later in self._checkpoints.all():
            if later.step > self._checkpoint.step:
                self._checkpoints.set_aside(later)

    def _prune(self) -> None:
        assert self._checkpoint is not None
        prune(self._config, self._directory, best_scores(self._config, self._directory, self._checkpoint.step))

    def train(self) -> None:
        """Train to the end; ranks that are lost or hang are started again from the last checkpoint."""
        config, setup, directory = self._config, self._setup, self._directory
        with ExitStack() as stack:
            stack.callback(self._console.close)
            with garbage_kept():
                _ = setup.algorithm, setup.num_adapter_weights  # first: their errors come before anything starts
                _ = setup.warnings, setup.model_warnings
            for warning in [*setup.warnings, *setup.model_warnings]:
                self._tell("warning", message=warning)
            # Workers import their rewards while the engine starts.
            scorer = stack.enter_context(Scorer(config.rewards))
            with garbage_kept():
                sources = setup.training, setup.evaluation
            for warning in setup.image_warnings:
                self._tell("warning", message=warning)
            for source in sources:
                for warning in [*source.warnings, *row_warnings(setup, source)] if source is not None else ():
                    self._tell("warning", message=warning)
                if source is not None:
                    source.listen(lambda prompt, reason: directory.event("dropped", prompt=prompt, reason=reason))
            player = stack.enter_context(playing(setup))
            self._console.lines(opening(config, setup, directory.path, self._begins()))
            self._trial = RewardTrial(scorer, setup)
            self._trial.check()
            self._fingerprints = self._fingerprints or fingerprints(setup)
            restarts = Restarts(config.trainer.max_restarts)
            while True:
                try:
                    self._attempt(scorer, player)
                    break
                except RESTARTED as error:
                    again = restarts.after(error, self._config)
                    if again is None:
                        raise
                    if again is not self._config:
                        budget = f"learner.tokens_per_microbatch is {again.learner.tokens_per_microbatch} from now on"
                        self._tell("adapted", message=f"out of memory: {budget}")
                    self._config = again
                    self._tell("restart", message=str(error), restarts_left=restarts.left)
                    self._go_back()
            newest = self._checkpoints.all()[-1]
            metrics = directory.metrics(shown_metrics(config))
            self._console.lines(
                closing(config, directory.path, metrics, newest, self._length, samples=setup.source.samples)
            )

    def _begins(self) -> str:
        """The place where the run begins, for a person."""
        if self._checkpoint is None:
            return "new"
        where = f"{self._checkpoint.path}" if self._source else f"step {self._checkpoint.step}"
        return f"begins from {where}" if self._source else f"goes on after {where}"

    def _tell_finished(self) -> None:
        """Say that nothing is left to do, and which changes of the config therefore have no effect."""
        assert self._checkpoint is not None
        step = self._checkpoint.step
        way = f"To go on, {way_on(self._config, {step: self._logged() or {}}, step, self._length)}"
        if not self._checkpoint.has_optimizer:
            way = "It cannot go on without its optimizer's state"
        self._console.line(
            f"{self._directory.path} is finished: it has {plural(step, 'step')}; nothing was done. "
            f"{way}; to train anew, choose another trainer.run_dir"
        )
        for change in self._changes:
            self._console.line(f"changed, without effect: {change}")

    def _attempt(self, scorer: Scorer, player: EpisodePlayer | None) -> None:
        """One engine from its start to its end, with its place and its end in the run's record."""
        directory, checkpoint, source = self._directory, self._checkpoint, self._source
        directory.begin_attempt(
            None if checkpoint is None else checkpoint.step,
            checkpoint=None if checkpoint is None else str(checkpoint.path),
            source=None if source is None else str(source.path),
            command=sys.argv,
            changes=[str(change) for change in self._changes],
        )
        code, message = 1, ""
        try:
            with ExitStack() as stack:
                self._fit(self._build_trainer(stack, scorer, player))
                self._interruption.only_note()
            code = 0
        except BaseException as error:
            # A signal to all processes of a job makes others fail. That the last checkpoint has no room is news.
            stopped = None if type(error) is ResourceError else self._interruption.stopped
            shown = stopped or error
            if isinstance(shown, (MMRLError, Stopped)):
                code, message = shown.exit_code, str(shown)
            if stopped is None or not isinstance(error, Exception):
                raise
            directory.event("warning", message=f"after {stopped}: {type(error).__name__}: {error}")
            raise stopped from error
        finally:
            directory.end_attempt(code, message)

    def _build_trainer(self, stack: ExitStack, scorer: Scorer, player: EpisodePlayer | None) -> Trainer:
        """A trainer of a new engine; the stack closes what it uses."""
        from mmrl.rollout.collector import Collector
        from mmrl.training.trainer import RunContext, Trainer

        config, setup, directory = self._config, self._setup, self._directory
        algorithm = registry.create("algorithm", config.algorithm)
        engine, facts = self._start_engine(stack, algorithm)
        self._trial.check(0.0)
        states = () if self._source else self._state.get("trackers", ())  # another run is not written on
        trackers = stack.enter_context(tracking(config, directory, states))
        recorder = RunRecorder(config, directory, trackers, self._console, engine, self._fingerprints)
        collector = Collector(
            config, engine, scorer, recorder.progress, setup.penalties, event=recorder.event, player=player
        )
        watchdog = step_watchdog(config.trainer.step_timeout_s, engine, collector, directory)
        profiler = Profiler(
            engine,
            directory.path / "profile",
            self._profiled_steps,
            config.trainer.steps,
            lambda kind, message: self._tell(kind, message=message),
        )
        return Trainer(
            config,
            algorithm,
            engine,
            setup.encoder,
            collector,
            setup.training,
            setup.evaluation,
            RunContext(recorder, self._interruption, watchdog, profiler),
            precision=engine.precision,
            peak_flops_per_s=_peak_of_all(facts, config),
        )

    def _start_engine(self, stack: ExitStack, algorithm: Algorithm) -> tuple[Engine, Mapping[str, Any]]:
        """A new engine, and the facts that the run's folder now has of it."""
        from mmrl.cluster.launch import start_engine

        config, setup, directory, checkpoint = self._config, self._setup, self._directory, self._checkpoint
        start = time.monotonic()
        noise = nullcontext() if self._verbose else diverted(directory.path / "engines.log")
        with noise, garbage_kept():
            engine = start_engine(
                setup.engine_spec(algorithm, None if checkpoint is None else checkpoint.path),
                progress=lambda text: self._console.line(f"{'':{INDENT}}{text}"),
            )
        stack.callback(engine.close)
        self._interruption.renew()  # engines' packages take signals over
        self._interruption.check()
        facts = environment(config, engine) | {"rows": setup.reading}
        self._console.line(
            f"{'':{INDENT}}ready after {time.monotonic() - start:.0f} s: {facts['engine']['device_name']}, "
            f"{engine.precision}"
        )
        directory.write_environment(facts)
        directory.write_origins(self._origins, [change.key for change in self._changes])
        directory.write_config(to_yaml(config))
        return engine, facts

    def _fit(self, trainer: Trainer) -> None:
        """Train from the start, or from the checkpoint."""
        checkpoint, source = self._checkpoint, self._source
        if checkpoint is None:
            trainer.fit()
            return
        state, step, media = self._state["trainer"], checkpoint.step, self._directory.media
        if source is not None:
            inherit(source, self._directory, self._setup.media, state["carried_groups"])
        self._tell("resumed", message=f"from step {step}, {checkpoint.path}", step=step)
        trainer.restore(state, media)
        trainer.fit(step, self._unlogged_metrics(), is_saved=source is None)

    def _go_back(self) -> None:
        """Go back to the last checkpoint of this run, or to the one that it began from."""
        newest = self._checkpoints.newest(
            lambda damaged, error: self._tell("checkpoint_damaged", message=str(error), step=damaged.step)
        )
        self._source = self._source if newest is None else None
        self._checkpoint, self._state = newest or self._source, {}
        if self._checkpoint is not None:
            self._checkpoint.require_optimizer()
            self._load_state()
            self._set_aside_later()

    def _load_state(self) -> None:
        assert self._checkpoint is not None
        self._state = self._checkpoint.read_state(RUN_STATE)
        if missing := {"attempt", "config", "fingerprints", "trainer", "metrics"} - {*self._state}:
            raise CheckpointError(
                f"the checkpoint's {RUN_STATE} lacks {', '.join(sorted(missing))}", where=str(self._checkpoint.path)
            )

    def _logged(self) -> dict[str, Any] | None:
        """The line of the checkpoint's step in metrics.jsonl, unless it is of an attempt that was undone."""
        assert self._checkpoint is not None
        return self._directory.logged(self._checkpoint.step, self._state["attempt"])

    def _unlogged_metrics(self) -> Mapping[str, float] | None:
        """Metrics of the checkpoint's step, if its evaluation or its line in metrics.jsonl is missing."""
        assert self._checkpoint is not None
        step, config = self._checkpoint.step, self._config
        logged = self._logged()
        is_due = config.data.eval is not None and config.trainer.evaluates(step)
        is_evaluated = logged is not None and any(name.startswith("eval/") for name in logged)
        if logged is not None and (is_evaluated or not is_due):
            return None
        values: Mapping[str, float | None] = self._state["metrics"] or metrics_of(logged)
        return {name: math.nan if value is None else value for name, value in values.items()}

    def _has_learned_enough(self) -> bool:
        """True if the checkpoint's step fulfils ``trainer.stop_when``; the console then says so."""
        assert self._checkpoint is not None
        condition, step = self._config.trainer.stop_condition, self._checkpoint.step
        values = self._logged() or {}
        if condition is None or self._unlogged_metrics() is not None or not condition.holds(values):
            return False
        told = f"{self._directory.path} has ended after step {step} by trainer.stop_when: {condition.told(values)}"
        self._console.line(f"{told}; change trainer.stop_when to go on")
        return True

    def _has_no_finished_step(self) -> bool:
        """True if no step was ever finished."""
        assert self._checkpoint is not None
        return self._checkpoint.step == 0 and not self._directory.has_steps

    def _why_anew(self) -> str:
        """The reason not to go on from a checkpoint before the first step; empty if there is none."""
        assert self._checkpoint is not None
        if any(change.matters for change in self._changes):
            return "the config has changed"
        return "" if self._checkpoint.has_optimizer else "the checkpoint has no optimizer state"

    def _start_anew(self, why: str) -> None:
        self._tell("start_anew", message=f"{why}, and no step was finished yet")
        self._directory.start_anew()
        self._checkpoint, self._state, self._changes = None, {}, []
        self._set_up(None)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._directory.event(kind, **fields)
        self._console.line(f"{kind}: {fields['message']}")


def _peak_of_all(facts: Mapping[str, Any], config: Config) -> float | None:
    """Operations a second that the devices of all ranks do at most, as environment.json tells of one."""
    peak = facts["engine"].get("peak")
    return None if peak is None else peak["flops_per_s"] * config.cluster.ranks
