"""An evaluation from its config to its results: the prompts, the engine if anything is to be sampled, the numbers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.cluster.process import prepare_process
from mmrl.commands.eval.best_of import best_of, with_chooser
from mmrl.commands.eval.categories import by_category, category_estimates
from mmrl.commands.eval.comparison import compare
from mmrl.commands.eval.estimates import Estimates, differences, estimates, rewards_by_metric
from mmrl.commands.eval.model import weights_of, with_whole_model
from mmrl.commands.eval.options import Options, check_counts, with_one_set
from mmrl.commands.eval.output import OutputFolder, Samples
from mmrl.commands.eval.results import Ablation, Results
from mmrl.config.evaluations import LEAST_TEMPERATURE, EvaluationSet, EvaluationSpec
from mmrl.config.plugin_specs import Kind, PluginSpec
from mmrl.config.sections import Config, ModelConfig
from mmrl.engine_api import Engine, Sampler
from mmrl.errors import ConfigError
from mmrl.ops.estimation import Estimate
from mmrl.ops.metrics import right_of
from mmrl.plugin_host.registry import locate
from mmrl.plugin_host.used import own_code
from mmrl.rollout.collector import Collector, Evaluation, evaluation_metrics
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.checkpoints import Checkpoint
from mmrl.runs.episodes import playing
from mmrl.runs.evaluated import BLANK_SAMPLES, SAMPLES
from mmrl.runs.resumption import template_fingerprint
from mmrl.runs.setup import RunSetup
from mmrl.system.console import Console, visible
from mmrl.system.redaction import Redactor
from mmrl.system.signals import Interruption
from mmrl.system.version import __version__
from mmrl.types import EncodedPrompt, ScoredGroup

_NOT_RESULTS = {"timeout_s", "on_error", "workers"}
"""Settings of rewards and environments that do not change a score."""


def evaluate(
    config: Config,
    options: Options,
    *,
    checkpoint: Checkpoint | None = None,
    initial: ModelConfig | None = None,
    interruption: Interruption | None = None,
) -> Results:
    """Score the config's model on ``data.eval``, or on one of the sets there.

    Without rewards its answers are compared, see ``compare``.

    Args:
        checkpoint: The model's checkpoint, for the results.
        initial: The model that it was trained from; None if nobody says.
        interruption: Handles signals; by default their handlers stay.

    Raises:
        MMRLError: The config, the data, a plugin or the machine does not allow it.
        Stopped: A signal came; scored groups are kept in ``options.output``.
    """
    interruption = interruption or Interruption()
    config = with_one_set(config, options.on)
    if not config.rewards and config.environment is None:
        return compare(config, options, checkpoint, initial, interruption)
    config, how = _decided(config, options)
    config, chooser = with_chooser(config, options.by)
    kind = prepare_process()
    from mmrl.engine.device import precision

    with ExitStack() as stack:
        name = config.model.path
        config = stack.enter_context(with_whole_model(config))
        output = None if options.output is None else stack.enter_context(OutputFolder(options.output))
        media = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else output.media
        setup = RunSetup(config, media)
        penalties = setup.penalties
        scorer = stack.enter_context(Scorer(config.rewards))  # its workers import their rewards meanwhile
        (source,) = setup.evaluations.values()
        prompts = source.each(setup.encoder.encode, options.limit)
        settings = _settings(config, how, options, precision(kind, config.model.dtype))
        if output is not None:
            content = {"weights": weights_of(setup.folder), **template_fingerprint(setup.folder)}
            output.claim({**settings, **content, "prompts": source.fingerprint, "rewards": _rewards(config)})
        pictured = [prompt for prompt in prompts if prompt.images] if options.blank_images else []
        if options.blank_images and not pictured:
            raise ConfigError("no prompt has an image to leave out", where=f"--blank-images: {how.key}")
        blanks = [setup.encoder.blanked(each) for each in pictured]
        engine = _OnDemand(config, setup, interruption, stack)
        console = Console(0, sys.stderr)
        stack.callback(console.close)
        player = stack.enter_context(playing(setup))
        collector = Collector(config, engine, scorer, console.progress, penalties, event=_show, player=player)

        def run(prompts: Sequence[EncodedPrompt], name: str) -> Evaluation:
            if output is None:
                return collector.evaluate(prompts, how)
            samples = Samples(output.path / name, prompts, how.num_samples, output.media)
            found = collector.evaluate(prompts, how, known=samples.known, keep=samples.keep)
            samples.finish()
            return found

        whole = run(prompts, SAMPLES)
        right = [right_of(group.component(how.judge)) for group in whole.groups]
        categories = [prompt.prompt.category for prompt in prompts]
        results = Results(
            model=name,
            checkpoint=checkpoint,
            settings=settings,
            counts=_counts(whole.groups, len(source.dropped)),
            metrics=_estimates(collector, how, whole.groups, whole.metrics) | category_estimates(right, categories),
            sources=_by_source(collector, how, whole.groups),
            ablation=_ablation(collector, how, whole.groups, run(blanks, BLANK_SAMPLES)) if blanks else None,
            categories=by_category(right, categories),
            best_of=None
            if options.best_of is None
            else best_of(collector.batch(whole.groups), options.best_of, chooser, how.judge),
        )
        if output is not None:
            output.write_results(results.data())
    return results


class _OnDemand:
    """The engine, which is started when something is to be sampled, and closed with the stack."""

    def __init__(self, config: Config, setup: RunSetup, interruption: Interruption, stack: ExitStack) -> None:
        self._config, self._setup, self._interruption, self._stack = config, setup, interruption, stack

    def sampling(self, version: int | None = None) -> AbstractContextManager[Sampler]:
        return self._engine.sampling(version)

    @cached_property
    def _engine(self) -> Engine:
        from mmrl.cluster.launch import start_engine
        from mmrl.engine.spec import EngineSpec

        setup = self._setup
        images = max(source.max_images for source in setup.evaluations.values())
        engine = start_engine(EngineSpec(self._config, setup.folder, setup.media, None, images, with_sampler=True))
        self._stack.callback(engine.close)
        self._interruption.renew()  # engines' packages take signals over
        self._interruption.check()
        return engine


def _decided(config: Config, options: Options) -> tuple[Config, EvaluationSet]:
    """The config with the options in it, and how its only evaluation set is sampled."""
    check_counts(options)
    temperature = options.temperature
    if temperature is not None and temperature != 0 and not LEAST_TEMPERATURE <= temperature <= 10:
        raise ConfigError(f"--temperature is {temperature}", where="mmrl eval", possible="0 (greedy), or 0.01 to 10")
    (known,) = config.evaluations.values()
    if temperature is None and isinstance(known.spec, EvaluationSpec):
        temperature = known.spec.temperature
    count = options.samples or max(known.num_samples, options.best_of or 1)
    if options.best_of is not None and not 2 <= options.best_of <= count:
        possible = f"2 to {count}, the completions of each prompt (--samples)" if count > 1 else "2 or more"
        raise ConfigError(f"--best-of is {options.best_of}", where="mmrl eval", possible=possible)
    if options.by is not None and options.best_of is None:
        raise ConfigError("--by chooses the best of several completions", where="--by", remedy="add --best-of N")
    most = options.max_new_tokens or known.max_new_tokens
    if temperature is None:
        temperature = 0.0 if count == 1 else config.sampler.temperature
    how = replace(known, num_samples=count, temperature=temperature, max_new_tokens=most)
    if how.temperature == 0 and how.num_samples > 1:
        raise ConfigError(
            f"{how.num_samples} greedy completions of a prompt are all the same",
            where="--temperature 0" if options.temperature == 0 else f"{how.key}.temperature: 0",
            remedy="ask for one completion (--samples 1), or for a temperature above 0",
        )
    return _as_sampled(config, how), how


def _as_sampled(config: Config, how: EvaluationSet) -> Config:
    """The config of an engine that samples one evaluation set alone."""
    sampler = {"max_new_tokens": how.max_new_tokens} | ({"temperature": how.temperature} if how.temperature else {})
    config = config.model_copy(update={"sampler": config.sampler.model_copy(update=sampler)})
    if not how.name:
        return config
    own = {how.name: how.spec.model_copy(update={"max_new_tokens": None})}
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": own})})


def _settings(config: Config, how: EvaluationSet, options: Options, precision: str) -> dict[str, Any]:
    """Settings that the completions depend on, without files' content."""
    environment = {} if config.environment is None else {"environment": _as_decided(config.environment, "environment")}
    template = {"template_options": config.data.template_options} if config.data.template_options else {}
    return {
        "mmrl": __version__,
        **({"on": how.name} if how.name else {}),
        **template,
        "dataset": how.spec.source,
        "samples": how.num_samples,
        "temperature": how.temperature,
        "max_new_tokens": config.sampler.max_new_tokens,
        "limit": options.limit,
        "seed": config.trainer.seed,
        "sampler": config.sampler.name,
        "engine": dict(config.sampler.engine),
        "precision": precision,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
        "accuracy": how.accuracy,
        **environment,
    }


def _rewards(config: Config) -> list[dict[str, Any]]:
    """Everything that decides about scores."""
    return [_as_decided(spec, "reward") for spec in config.rewards]


def _as_decided(spec: PluginSpec, kind: Kind) -> dict[str, Any]:
    """A plugin's options that change results, the version of its package or file, and those of files that it names."""
    options = {key: value for key, value in spec.model_dump(mode="json").items() if key not in _NOT_RESULTS}
    code = own_code(kind, spec)
    return options | {"version": locate(kind, spec.name).version} | ({"files": code} if code else {})


def _counts(groups: Sequence[ScoredGroup], dropped: int) -> dict[str, int]:
    return {
        "prompts": len(groups),
        "completions": sum(len(group.group.rollouts) for group in groups),
        "unscored": sum(int((~group.valid).sum()) for group in groups),
        "with_images": sum(bool(group.group.prompt.images) for group in groups),
        "dropped": dropped,
    }


def _estimates(
    collector: Collector,
    how: EvaluationSet,
    groups: Sequence[ScoredGroup],
    values: Mapping[str, float] | None = None,
) -> dict[str, Estimate]:
    batch = collector.batch(groups)
    return estimates(groups, batch, evaluation_metrics(batch, how) if values is None else values, how.judge)


def _by_source(
    collector: Collector, how: EvaluationSet, groups: Sequence[ScoredGroup]
) -> dict[str, tuple[int, Estimates]]:
    found: dict[str, tuple[int, Estimates]] = {}
    for source in dict.fromkeys(group.group.prompt.prompt.source for group in groups):
        own = [group for group in groups if group.group.prompt.prompt.source == source]
        found[source] = len(own), _estimates(collector, how, own)
    return found


def _ablation(collector: Collector, how: EvaluationSet, groups: Sequence[ScoredGroup], blank: Evaluation) -> Ablation:
    names = {group.group.prompt.id for group in blank.groups}
    own = [group for group in groups if group.group.prompt.id in names]
    batches = collector.batch(own), collector.batch(blank.groups)
    wanted = rewards_by_metric(batches[0], how.judge)
    pictures, without = (
        {name: estimate for name, estimate in _estimates(collector, how, each).items() if name in wanted}
        for each in (own, blank.groups)
    )
    return Ablation(len(own), pictures, without, differences(*batches, how.judge))


def _show(kind: str, **fields: Any) -> None:
    print(f"{kind}: {visible(Redactor()(fields['message']))}", file=sys.stderr)
