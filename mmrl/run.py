"""The composition root: a config becomes objects, and the objects run."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmrl import __version__, registry
from mmrl.checking.examination import examine
from mmrl.checking.report import Report
from mmrl.cluster.process import prepare_process
from mmrl.config import Config, LoadedConfig, to_yaml
from mmrl.console import Console, visible
from mmrl.errors import ConfigError, MMRLError, PluginError
from mmrl.interfaces import Engine, Learner
from mmrl.plan import RunPlan
from mmrl.redaction import Redactor
from mmrl.rollout_records import rollout_records
from mmrl.run_directory import RunDirectory
from mmrl.scoring.scorer import Scorer
from mmrl.tracking import Trackers
from mmrl.types import CreditedGroup


def check(loaded: LoadedConfig) -> Report:
    """Check a config as far as that goes without a device: plugins, model files, every row, the rewards, the disk.

    Raises:
        MMRLError: The plugins do not fit the config; what else is wrong is in the report.
    """
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return examine(loaded.config, Path(folder))


def train(loaded: LoadedConfig) -> int:
    """Run the config; returns the exit code.

    Raises:
        MMRLError: See the exit codes in ``mmrl.errors``; also noted in RUN/events.jsonl once there is one.
    """
    prepare_process()
    config = loaded.config
    directory = RunDirectory.create(config.trainer.run_dir)
    try:
        _train(config, directory)
    except MMRLError as error:
        details = error.details if isinstance(error, PluginError) else ""
        directory.event("error", message=str(error), exit_code=error.exit_code, details=details)
        if details:
            place = f"{directory.path / 'events.jsonl'} has the details"
            error.remedy = "; ".join(filter(None, [error.remedy, place]))
        raise
    finally:
        directory.release()
    return 0


def evaluate(loaded: LoadedConfig, model: Path | None = None) -> dict[str, Any]:
    """Score a model on ``data.eval``; returns its metrics.

    Args:
        model: A Hugging Face folder to evaluate in place of ``model.path``.
    """
    from mmrl.cluster.launch import start_engine
    from mmrl.collection import Collector

    prepare_process()
    config = loaded.config
    if model is not None:
        other = {"path": str(model), "revision": None}
        config = config.model_copy(update={"model": config.model.model_copy(update=other)})
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config.rewards))
        plan = RunPlan(config, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if plan.evaluation is None:
            raise ConfigError("there is nothing to evaluate on", where="data.eval", remedy="name a dataset")
        engine = start_engine(
            config, plan.folder, plan.media, None, max_images=plan.evaluation.max_images, with_sampler=True
        )
        stack.callback(engine.close)
        console = Console(len(plan.evaluation))
        stack.callback(console.close)

        def show(kind: str, **fields: Any) -> None:
            print(f"{kind}: {visible(Redactor()(fields['message']))}", file=sys.stderr)

        collector = Collector(config, engine, plan.encoder, scorer, console.progress, event=show)
        values = collector.evaluate(plan.evaluation)
    counts = {"prompts": plan.evaluation.num_usable, "dropped": len(plan.evaluation.dropped)}
    return {"model": config.model.path, **counts, **values}


class RunRecorder:
    """Implements ``trainer.Recorder``: the run's folder, the trackers and the console."""

    def __init__(self, directory: RunDirectory, trackers: Trackers, console: Console, engine: Engine) -> None:
        self._directory, self._trackers, self._console, self._engine = directory, trackers, console, engine

    def log(self, step: int, values: Mapping[str, float]) -> None:
        values = {**values, "perf/memory_bytes_max": float(self._engine.memory_bytes_max())}
        self._directory.append_metrics(step, values)
        self._trackers.log(step, values)
        self._console.step(step, values)

    def rollouts(self, step: int, groups: Sequence[CreditedGroup]) -> None:
        records = (record for index, group in enumerate(groups) for record in rollout_records(index, group))
        self._directory.write_rollouts(step, records)

    def event(self, kind: str, **fields: Any) -> None:
        self._directory.event(kind, **fields)
        self._console.line(f"{kind}: {fields.get('message', fields)}")

    def progress(self, phase: str, done: int, total: int) -> None:
        self._console.progress(phase, done, total)


def _train(config: Config, directory: RunDirectory) -> None:
    from mmrl.cluster.launch import start_engine
    from mmrl.collection import Collector
    from mmrl.trainer import Trainer

    plan = RunPlan(config, directory.media)
    with ExitStack() as stack:
        algorithm = plan.algorithm
        console = Console(config.trainer.steps)
        stack.callback(console.close)
        for warning in plan.warnings:
            directory.event("warning", message=warning)
            console.line(f"warning: {warning}")
        # Workers import their rewards while the engine starts.
        scorer = stack.enter_context(Scorer(config.rewards))
        for source in (plan.training, plan.evaluation):
            if source is not None:
                source.listen(lambda prompt, reason: directory.event("dropped", prompt=prompt, reason=reason))
        engine = start_engine(
            config, plan.folder, plan.media, algorithm, max_images=plan.max_images, with_sampler=plan.with_sampler
        )
        stack.callback(engine.close)
        directory.write_environment(_environment(config, engine))
        directory.write_config(to_yaml(config))
        trackers = stack.enter_context(_tracking(config, directory))
        recorder = RunRecorder(directory, trackers, console, engine)
        trainer = Trainer(
            config,
            algorithm,
            engine,
            plan.encoder,
            Collector(config, engine, plan.encoder, scorer, recorder.progress, plan.penalties, event=recorder.event),
            plan.training,
            plan.evaluation,
            recorder,
            precision=engine.precision,
        )
        trainer.fit(lambda learner, step: _save(directory, learner, step, config.trainer.keep_checkpoints))


@contextmanager
def _tracking(config: Config, directory: RunDirectory) -> Iterator[Trackers]:
    trackers = Trackers(
        [registry.create("tracker", spec) for spec in config.trackers],
        lambda message: directory.event("tracker", message=message),
    )
    trackers.start(directory.path, config.model_dump(mode="json"))
    try:
        yield trackers
    finally:
        trackers.finish(timeout_s=30)


def _save(directory: RunDirectory, learner: Learner, step: int, keep: int) -> None:
    """Write checkpoints/step-N/model whole or not at all, then remove the oldest."""
    final = directory.checkpoints / f"step-{step:06d}"
    temporary = directory.checkpoints / f".step-{step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    learner.save(temporary / "model")
    temporary.rename(final)
    for old in sorted(directory.checkpoints.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


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
