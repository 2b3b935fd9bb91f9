"""The commands that run something: a config becomes objects, and the objects run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mmrl.checking.examination import examine
from mmrl.checking.report import Report
from mmrl.cluster.process import prepare_process
from mmrl.config import LoadedConfig
from mmrl.console import Console, visible
from mmrl.errors import ConfigError, MMRLError, PluginError
from mmrl.interruption import Interruption, Stopped
from mmrl.plan import RunPlan
from mmrl.redaction import Redactor
from mmrl.run_directory import RunDirectory
from mmrl.scoring.scorer import Scorer
from mmrl.training import TrainingRun


def check(loaded: LoadedConfig) -> Report:
    """Check a config as far as that goes without a device: plugins, model files, every row, the rewards, the disk.

    Raises:
        MMRLError: The plugins do not fit the config; what else is wrong is in the report.
    """
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return examine(loaded.config, Path(folder))


def train(
    loaded: LoadedConfig,
    interruption: Interruption | None = None,
    *,
    resume: str = "auto",
    strict: bool = False,
    allowed: Sequence[str] = (),
) -> int:
    """Run the config, or go on with the run that its directory holds; returns the exit code.

    Args:
        resume: ``auto`` goes on from the newest good checkpoint, ``never`` refuses a directory that holds a run; else
            the path of another run, or of a checkpoint of one, to begin a new run from; the same words go on with that.
        interruption: What signals do; by default what they did before.
        strict: Refuse to go on if the newest checkpoint is damaged, rather than from the one before.
        allowed: Keys whose change is no reason to refuse.

    Raises:
        MMRLError: See the exit codes in ``mmrl.errors``; also noted in RUN/events.jsonl once there is one.
        Stopped: A signal ended the run; it can go on.
    """
    interruption = interruption or Interruption()
    prepare_process()
    source = None if resume in ("auto", "never") else Path(resume)
    directory = RunDirectory.create(loaded.config.trainer.run_dir, new=resume == "never", source=source)
    try:
        run = TrainingRun(loaded.config, directory, interruption)
        if not run.find_start(resume, strict, allowed):
            return 0
        run.train()
    except MMRLError as error:
        details = error.details if isinstance(error, PluginError) else ""
        directory.event("error", message=str(error), exit_code=error.exit_code, details=details)
        if details:
            place = f"{directory.path / 'events.jsonl'} has the details"
            error.remedy = "; ".join(filter(None, [error.remedy, place]))
        raise
    except Stopped as stopped:
        directory.event("stopped", message=str(stopped), exit_code=stopped.exit_code)
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
