"""An evaluation on pairs: candidates of held-out rows are judged by forward passes, and nothing is sampled."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.cluster.process import prepare_process
from mmrl.commands.eval.categories import by_category, category_estimates
from mmrl.commands.eval.model import weights_of, with_whole_model
from mmrl.commands.eval.options import Options, check_counts
from mmrl.commands.eval.output import OutputFolder
from mmrl.commands.eval.results import Ablation, ComparedResults
from mmrl.config.evaluations import EvaluationSet
from mmrl.config.plugin_specs import NONE
from mmrl.config.sections import Config, ModelConfig
from mmrl.errors import ConfigError, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.ops.estimation import Estimate, mean_estimate, score_estimate
from mmrl.plugin_host.used import own_code
from mmrl.rollout.records import credited_records
from mmrl.runs.checkpoints import Checkpoint
from mmrl.runs.evaluated import BLANK_SAMPLES, SAMPLES
from mmrl.runs.files import replace_file
from mmrl.runs.recorder import RUN_STATE
from mmrl.runs.resumption import template_fingerprint
from mmrl.runs.setup import RunSetup
from mmrl.step.forward import Judge, Judged, judged
from mmrl.step.learn import LearnSettings
from mmrl.system.redaction import Redactor
from mmrl.system.signals import Interruption
from mmrl.system.version import __version__
from mmrl.token_columns import REFERENCE
from mmrl.types import EncodedPrompt, FloatArray, ScoredGroup

if TYPE_CHECKING:
    from mmrl.engine.network.folder import ModelFolder

_SAMPLED = ("samples", "temperature", "best_of", "by")
"""Options that only completions have which are sampled."""


def compare(
    config: Config,
    options: Options,
    checkpoint: Checkpoint | None = None,
    initial: ModelConfig | None = None,
    interruption: Interruption | None = None,
) -> ComparedResults:
    """Compare the candidates of the rows of the config's only evaluation set, by the rewards of its algorithm.

    Args:
        checkpoint: The model's, for the results and the algorithm's state.
        initial: The model that it was trained from, which is the reference; None if nobody says.

    Raises:
        MMRLError: The config, the data, a plugin or the machine does not allow it.
        Stopped: A signal came.
    """
    interruption = interruption or Interruption()
    config, how = _decided(config, options)
    kind = prepare_process()
    from mmrl.engine.device import precision

    with ExitStack() as stack:
        name = config.model.path
        config = stack.enter_context(with_whole_model(config))
        output = None if options.output is None else stack.enter_context(OutputFolder(options.output))
        media = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else output.media
        setup = RunSetup(config, media)
        algorithm = _algorithm(setup, checkpoint)
        reference = _reference(setup, name, initial)
        (source,) = setup.evaluations.values()
        prompts = source.each(setup.encoder.encode, options.limit)
        pictured = [at for at, prompt in enumerate(prompts) if prompt.images] if options.blank_images else []
        if options.blank_images and not pictured:
            raise ConfigError("no prompt has an image to leave out", where=f"--blank-images: {how.key}")
        settings = _settings(config, how, options, precision(kind, config.model.dtype), initial if reference else None)
        if output is not None:
            folders = {"weights": setup.folder} | ({"reference_weights": reference} if reference else {})
            content = {key: weights_of(folder) for key, folder in folders.items()} | template_fingerprint(setup.folder)
            output.claim({**settings, **content, "prompts": source.fingerprint})
        judge = stack.enter_context(_judge(setup, algorithm, reference, interruption))
        found = _Pairs(prompts, setup, judge)
        blanks = [setup.encoder.blanked(prompts[at]) for at in pictured]
        blank = _Pairs(blanks, setup, judge) if blanks else None
        results = ComparedResults(
            model=name,
            checkpoint=checkpoint,
            settings=settings,
            counts=found.counts(len(source.dropped)),
            metrics=found.estimates() | category_estimates(found.judged.right, found.categories),
            sources={each: (len(places), found.estimates(places)) for each, places in found.sources().items()},
            ablation=None if blank is None else _ablation(found, blank, pictured),
            categories=by_category(found.judged.right, found.categories),
        )
        if output is not None:
            for file, each in ((SAMPLES, found), (BLANK_SAMPLES, blank)):
                if each is not None:
                    _write(output.path / file, each)
            output.write_results(results.data())
    return results


def _decided(config: Config, options: Options) -> tuple[Config, EvaluationSet]:
    """The config with the options in it, and its evaluation set."""
    check_counts(options)
    for name in _SAMPLED:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of sampled completions, and without rewards the rows' own are compared",
                where="mmrl eval",
                remedy="leave it out, or add rewards: 'rewards=[{name: ...}]'",
            )
    (how,) = config.evaluations.values()
    if config.algorithm.name == NONE:
        raise ConfigError(
            "nothing tells right from wrong: there is no reward, and no algorithm that compares the rows' answers",
            where="rewards, algorithm",
            remedy="add a reward: 'rewards=[{name: ...}]'; or, for preference data, the algorithm of a run on pairs",
        )
    most = options.max_new_tokens or how.max_new_tokens
    sampler = config.sampler.model_copy(update={"max_new_tokens": most})
    own = config.data.model_copy(update={"eval": {how.name: how.spec.model_copy(update={"max_new_tokens": None})}})
    config = config.model_copy(update={"sampler": sampler} | ({"data": own} if how.name else {}))
    (how,) = config.evaluations.values()
    return config, how


def _algorithm(setup: RunSetup, checkpoint: Checkpoint | None) -> Algorithm:
    """The algorithm that compares, with its state in the checkpoint, if that is of the same one."""
    algorithm = setup.algorithm
    if not setup.evaluates_given:
        raise ConfigError(
            "evaluation needs at least one reward: the algorithm compares no answers of rows",
            where=f"rewards; algorithm: {setup.config.algorithm.name}",
            remedy="add one: 'rewards=[{name: ...}]'",
        )
    if checkpoint is not None:
        record = checkpoint.read_state(RUN_STATE)
        state = record.get("trainer", {}).get("algorithm")
        if state and record["config"]["algorithm"]["name"] == setup.config.algorithm.name:
            with plugin_errors(algorithm, "restore"):
                algorithm.restore(state)
    return algorithm


def _reference(setup: RunSetup, model: str, initial: ModelConfig | None) -> ModelFolder | None:
    """The folder of the reference; None if the algorithm compares without one.

    Raises:
        ConfigError: There is none, it is the model itself, or the run had another than the initial policy.
    """
    if REFERENCE not in setup.algorithm.needs().roles:
        return None
    name, other = setup.config.algorithm.name, setup.config.reference
    if other.models or other.reset_every is not None:
        raise ConfigError(
            "answers are compared with the initial policy as reference, and the run had another one",
            where=f"reference: {', '.join(each.path for each in other.models) or f'reset_every {other.reset_every}'}",
            possible="eval/* in the run's metrics.jsonl are by its own reference",
            remedy="compare with the initial policy all the same: reference.path=null reference.teachers=[] "
            "reference.reset_every=null",
        )
    remedy = "name a run or a checkpoint, whose config has it; or a trained model, and beside it a config (or "
    remedy += f"model.path=...) with the model that it was trained from: mmrl eval --model TRAINED model.path={model}"
    if initial is None or (initial.path, initial.revision) == (model, setup.config.model.revision):
        what = "there is none" if initial is None else "that is the model itself, so that each margin would be 0"
        raise ConfigError(f"algorithm {name!r} compares with a reference, and {what}", where="--model", remedy=remedy)
    from mmrl.engine.network.folder import ModelFolder

    try:
        return ModelFolder.open(initial.path, initial.revision, trust_remote_code=initial.trust_remote_code)
    except ConfigError as error:
        error.what = f"the reference cannot be opened: {error.what}"
        error.remedy = "run this command where the run was started, or name the reference: model.path=FOLDER"
        raise


@contextmanager
def _judge(
    setup: RunSetup, algorithm: Algorithm, reference: ModelFolder | None, interruption: Interruption
) -> Iterator[Judge]:
    """A judge by the algorithm's loss, whose engine ends with the block."""
    from mmrl.cluster.launch import start_engine
    from mmrl.engine.spec import EngineSpec

    images = max(source.max_images for source in setup.evaluations.values())
    args = setup.config, setup.folder, setup.media, algorithm, images
    engine = start_engine(EngineSpec(*args, with_sampler=False, trains=False, initial=reference))
    try:
        interruption.renew()  # engines' packages take signals over
        interruption.check()

        def judge(groups: Sequence[ScoredGroup]) -> Judged:
            with engine.learning() as learner:
                settings = LearnSettings(max_tokens=setup.config.sampler.max_new_tokens)
                found = judged(groups, algorithm, learner, settings)
            interruption.check()
            return found

        yield judge
    finally:
        engine.close()


class _Pairs:
    """Rows whose candidates were judged.

    Attributes:
        judged: The judgement.
        categories: Each row's; empty for none.
    """

    def __init__(self, prompts: Sequence[EncodedPrompt], setup: RunSetup, judge: Judge) -> None:
        group = partial(setup.step_source.group, needs=setup.algorithm.needs(), encoder=setup.encoder)
        self._prompts = prompts
        self.judged = judge([group(prompt) for prompt in prompts])
        self.categories = [prompt.prompt.category for prompt in prompts]

    def counts(self, dropped: int) -> dict[str, int]:
        return {
            "prompts": len(self._prompts),
            "completions": sum(len(group.scored.rollouts) for group in self.judged.groups),
            "unscored": 0,
            "with_images": sum(bool(prompt.images) for prompt in self._prompts),
            "dropped": dropped,
        }

    def sources(self) -> dict[str, list[int]]:
        """The places of each source's rows."""
        found: dict[str, list[int]] = {}
        for place, prompt in enumerate(self._prompts):
            found.setdefault(prompt.prompt.source, []).append(place)
        return found

    def estimates(self, places: Sequence[int] | None = None) -> dict[str, Estimate]:
        """The metrics that a run logs, with intervals; of all rows with the loss, or of those at some places."""
        chosen = range(len(self._prompts)) if places is None else places
        found = {name: _mean(name, each) for name, each in self.values(chosen).items()}
        if places is None:  # to the last digit as a run logs them
            logged = self.judged.metrics
            found = {name: replace(found.get(name, Estimate(0.0)), value=value) for name, value in logged.items()}
        return {f"eval/{name}": estimate for name, estimate in found.items()}

    def values(self, places: Sequence[int]) -> dict[str, FloatArray]:
        """By name, a value for each row at these places: the mean over its candidates; NaN where none has one."""
        found = {}
        for name, of_groups in self.judged.values.items():
            own = [of_groups[place][~np.isnan(of_groups[place])] for place in places]
            values = np.array([each.mean() if len(each) else np.nan for each in own])
            if not np.isnan(values).all():
                found[name] = values
        return found


def _mean(name: str, values: FloatArray) -> Estimate:
    """The mean over rows and its interval; that of accuracies stays between 0 and 1."""
    known = values[~np.isnan(values)]
    estimate: Callable[..., Estimate] = score_estimate if name == "accuracy" else mean_estimate
    return estimate(known, np.arange(len(known)))


def _ablation(found: _Pairs, blank: _Pairs, places: Sequence[int]) -> Ablation:
    """The same rows with their images and with blank ones."""
    pictures, without = found.values(places), blank.values(range(len(places)))
    names = [name for name in pictures if name in without]
    differences = {f"eval/{name}": _mean("", pictures[name] - without[name]) for name in names}
    return Ablation(len(places), found.estimates(places), blank.estimates(), differences)


def _settings(
    config: Config, how: EvaluationSet, options: Options, precision: str, reference: ModelConfig | None
) -> dict[str, Any]:
    """Settings that the numbers depend on, without files' content."""
    code = own_code("algorithm", config.algorithm)
    template = {"template_options": config.data.template_options} if config.data.template_options else {}
    return {
        "mmrl": __version__,
        **({"on": how.name} if how.name else {}),
        **template,
        "dataset": how.spec.source,
        "algorithm": config.algorithm.model_dump(mode="json") | ({"files": code} if code else {}),
        "reference": None if reference is None else _named(reference),
        "max_new_tokens": config.sampler.max_new_tokens,
        "limit": options.limit,
        "precision": precision,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
    }


def _named(model: ModelConfig) -> str:
    return model.path if model.revision is None else f"{model.path}@{model.revision}"


def _write(path: Path, pairs: _Pairs) -> None:
    """Write a line for each candidate."""
    redact = Redactor()
    records = [{**record, "failed": {}} for record in credited_records(pairs.judged.groups)]
    replace_file(path, "".join(json.dumps(redact.plain(record)) + "\n" for record in records))
