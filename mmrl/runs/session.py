"""A training run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from mmrl.cluster.process import garbage_kept
from mmrl.config.load import to_yaml
from mmrl.config.sections import Config
from mmrl.engine.machine.first_start import once
from mmrl.errors import MMRLError, ResourceError, SamplersRestarted
from mmrl.plugin_host import registry
from mmrl.rollout.records import recorded_images
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.checkpoints import Checkpoints
from mmrl.runs.directory import RunDirectory
from mmrl.runs.episodes import playing
from mmrl.runs.inheritance import inherit
from mmrl.runs.overdue import step_watchdog
from mmrl.runs.recorder import RunRecorder, provenance, tell, tracking
from mmrl.runs.restarts import RESTARTED, Restarts
from mmrl.runs.reward_trial import RewardTrial
from mmrl.runs.run_warnings import config_warnings, image_warnings, learning_warnings, model_warnings
from mmrl.runs.sampled_rows import sampled_warnings
from mmrl.runs.scored_rows import row_warnings
from mmrl.runs.spans import last_tokens_of
from mmrl.runs.start import Start, Starts
from mmrl.runs.summary import closing, opening, shown_evaluations, shown_metrics
from mmrl.system.console import Console, diverted
from mmrl.system.profiling import Profiler
from mmrl.system.report import INDENT
from mmrl.system.signals import Interruption, Stopped

if TYPE_CHECKING:
    from mmrl.engine_api import Engine
    from mmrl.interfaces import Algorithm
    from mmrl.rollout.episodes.player import EpisodePlayer
    from mmrl.step.loop import Trainer
    from mmrl.step.sync_probe import SyncProbe


class TrainingRun:
    """A run in its directory: from its start or its newest checkpoint to its end, through the loss of ranks.

    Args:
        starts: Finds the place to which the run goes back.
        profiled_steps: Steps to write a trace of, in each attempt.
        verbose: True if the engines' libraries write to the console while they start, and not to RUN/engines.log.
        origins: The place where each value of the config was written, by dotted key.
    """

    def __init__(
        self,
        start: Start,
        starts: Starts,
        directory: RunDirectory,
        interruption: Interruption,
        *,
        profiled_steps: int = 0,
        verbose: bool = False,
        origins: Mapping[str, str],
    ) -> None:
        self._start, self._starts, self._setup = start, starts, start.setup
        self._config = config = start.setup.config
        self._directory, self._interruption, self._origins = directory, interruption, origins
        self._profiled_steps, self._verbose = profiled_steps, verbose
        evaluated, stops_at = shown_evaluations(config), config.trainer.stop_when
        word = "acc" if config.accuracy or not evaluated else "pref"  # without rewards, comparisons alone are evaluated
        self._restarts = Restarts(config.trainer.max_restarts)
        self._console = Console(config.trainer.steps, evaluated=evaluated, stops_at=stops_at, accuracy=word)

    def train(self) -> None:
        """Train to the end; ranks that are lost or hang are started again from the last checkpoint."""
        config, setup, directory = self._config, self._setup, self._directory
        with ExitStack() as stack:
            stack.enter_context(self._console.guarding())
            stack.callback(self._console.close)
            with garbage_kept():
                _ = (
                    setup.algorithm,
                    setup.num_adapter_weights,
                    setup.teachers,
                    setup.critic,
                )  # first: their errors come before anything starts
                warnings = [*config_warnings(setup), *model_warnings(setup)]
            for warning in warnings:
                self._tell("warning", message=warning)
            # Workers import their rewards while the engine starts.
            scorer = stack.enter_context(Scorer(config.rewards, last_tokens=last_tokens_of(setup)))
            with garbage_kept():
                sources = setup.training, *setup.evaluations.values()
            for warning in [*image_warnings(setup), *learning_warnings(setup)]:
                self._tell("warning", message=warning)
            for source in sources:
                for warning in [*source.warnings, *sampled_warnings(setup, source), *row_warnings(setup, source)]:
                    self._tell("warning", message=warning)
                source.listen(lambda prompt, reason: directory.event("dropped", prompt=prompt, reason=reason))
            player = stack.enter_context(playing(setup))
            self._console.lines(opening(config, setup, directory.path, str(self._start)))
            self._trial = RewardTrial(scorer, setup)
            self._trial.check()
            for warning in self._trial.warnings:
                self._tell("warning", message=warning)
            _ = setup.fingerprints  # what is trained with now, and not once the engine has started
            restarts = self._restarts
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
                    self._start = self._starts.go_back(self._start)
            newest = Checkpoints(directory.checkpoints).all()[-1]
            metrics = directory.metrics(shown_metrics(config))
            self._console.lines(closing(config, directory.path, metrics, newest, setup.length))

    def _attempt(self, scorer: Scorer, player: EpisodePlayer | None) -> None:
        """One engine from its start to its end, with its place and its end in the run's record."""
        directory, saved = self._directory, self._start.saved
        directory.begin_attempt(None if saved is None else saved.step, **self._start.record())
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
            self._console.close()
            directory.end_attempt(code, message)

    def _build_trainer(self, stack: ExitStack, scorer: Scorer, player: EpisodePlayer | None) -> Trainer:
        """A trainer of a new engine; the stack closes what it uses."""
        from mmrl.rollout.collector import Collector
        from mmrl.rollout.partial import PartialCollector
        from mmrl.step.loop import RunContext, Trainer
        from mmrl.step.sync_probe import SyncProbe

        config, setup, directory = self._config, self._setup, self._directory
        algorithm = registry.create("algorithm", config.algorithm)
        engine, found = self._start_engine(stack, algorithm)
        self._trial.check(0.0)
        trackers = stack.enter_context(tracking(config, directory, self._start.trackers))
        recorder = RunRecorder(config, directory, trackers, self._console, engine, setup.fingerprints)
        collector = (Collector if config.sampler.partial is None else PartialCollector)(
            config, engine, scorer, recorder.progress, setup.penalties, event=recorder.event, player=player
        )
        stack.callback(collector.close)
        watchdog = step_watchdog(config.trainer.step_timeout_s, engine, collector, directory)
        probe = SyncProbe.of(config)
        with watchdog.watch("the audit"):
            self._audit(engine, probe)
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
            setup.evaluations,
            RunContext(recorder, self._interruption, watchdog, profiler, self._may_restart),
            precision=engine.precision,
            peak_flops_per_s=_peak_of_all(found, config),
            probe=probe,
        )

    def _may_restart(self, error: SamplersRestarted) -> bool:
        """Count and tell of ranks that sample alone and were started again; False if there were too many."""
        if self._restarts.after(error, self._config) is None:
            return False
        self._tell("restart", message=str(error), restarts_left=self._restarts.left)
        return True

    def _start_engine(self, stack: ExitStack, algorithm: Algorithm) -> tuple[Engine, Mapping[str, Any]]:
        """A new engine, and what environment.json now has of it."""
        from mmrl.cluster.launch import start_engine

        config, setup, directory = self._config, self._setup, self._directory
        is_vllm = setup.with_sampler and config.sampler.name == "vllm"
        if config.cluster.name == "local" and (slow := once(samples_with_vllm=is_vllm)):
            told = f"the first start here takes minutes, and later ones seconds: {', '.join(slow)}"
            self._console.line(f"{'':{INDENT}}{told}")
        start = time.monotonic()
        noise = nullcontext() if self._verbose else diverted(directory.path / "engines.log")
        with noise, garbage_kept():
            engine = start_engine(
                setup.engine_spec(algorithm, self._start.checkpoint),
                progress=lambda text: self._console.line(f"{'':{INDENT}}{text}"),
            )
        stack.callback(engine.close)
        self._interruption.renew()  # engines' packages take signals over
        self._interruption.check()
        found = provenance(config, engine) | {"rows": setup.reading}
        self._console.line(
            f"{'':{INDENT}}ready after {time.monotonic() - start:.0f} s: {found['engine']['device_name']}, "
            f"{engine.precision}"
        )
        directory.write_provenance(found)
        directory.write_origins(self._origins, [change.key for change in self._start.changes])
        directory.write_config(to_yaml(config))
        return engine, found

    def _audit(self, engine: Engine, probe: SyncProbe | None) -> None:
        """Probe what the engine computes, if there are steps to come; and sample the tokens of later probes."""
        from mmrl.step.audit.start_audit import audit

        saved = self._start.saved
        if saved is not None and saved.step >= self._config.trainer.steps:
            return
        with self._setup.media.passing():  # the folder keeps the images of rows alone
            told = audit(engine, self._setup.encoder, self._config, self._tell)
        if probe is not None:
            probe.sample(engine, self._setup.encoder, self._config)
        if told:
            self._console.line(f"{'':{INDENT}}{told}")

    def _fit(self, trainer: Trainer) -> None:
        """Train from the start, or from the checkpoint."""
        if (saved := self._start.saved) is None:
            trainer.fit()
            return
        from mmrl.step.slots import kept_records

        state, directory, media = saved.state["trainer"], self._directory, self._setup.media
        if saved.is_another:
            inherit(saved.checkpoint, directory, media, recorded_images(kept_records(state)))
        self._tell("resumed", message=f"from step {saved.step}, {saved.checkpoint.path}", step=saved.step)
        trainer.restore(state, directory.media, saved.step)
        trainer.fit(saved.step, saved.unlogged_metrics(self._config, directory), is_saved=not saved.is_another)

    def _tell(self, kind: str, **fields: Any) -> None:
        tell(self._directory, self._console, kind, **fields)


def _peak_of_all(found: Mapping[str, Any], config: Config) -> float | None:
    """Operations a second that the devices of all ranks do at most, as environment.json tells of one."""
    peak = found["engine"].get("peak")
    return None if peak is None else peak["flops_per_s"] * config.cluster.num_learner_ranks
