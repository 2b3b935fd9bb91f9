"""An evaluation from its config to its results: the prompts, the engine if anything is to be sampled, the numbers."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cluster.process import prepare_process
from mmrl.commands.eval.best_of import best_of, with_chooser
from mmrl.commands.eval.estimates import Estimates, differences, estimates, rewards_by_metric
from mmrl.commands.eval.output import OutputFolder, Samples
from mmrl.commands.eval.results import Ablation, Results
from mmrl.config.evaluations import LEAST_TEMPERATURE, EvaluationSet, EvaluationSpec
from mmrl.config.plugin_specs import Kind, PluginSpec
from mmrl.config.problems import suggestion
from mmrl.config.sections import Config
from mmrl.engine_api import Engine, Sampler
from mmrl.errors import ConfigError, ResourceError
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

if TYPE_CHECKING:
    from mmrl.engine.network.folder import ModelFolder

_NOT_RESULTS = {"timeout_s", "on_error", "workers"}
"""Settings of rewards and environments that do not change a score."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options; None leaves one to the config.

    Attributes:
        samples: Completions of each prompt.
        temperature: 0 is greedy, as is one completion without a temperature.
        limit: How many prompts, from the first on.
        blank_images: True to sample prompts with images also with blank ones.
        output: Where completions and results are kept.
        on: The evaluation set's name; needed if there are several.
        best_of: Completions of which the best one is chosen.
        by: The reward that chooses it, see ``with_chooser``; None for the weighted sum.
    """

    samples: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    limit: int | None = None
    blank_images: bool = False
    output: Path | None = None
    on: str | None = None
    best_of: int | None = None
    by: str | None = None


def evaluate(
    config: Config, options: Options, *, checkpoint: Checkpoint | None = None, interruption: Interruption | None = None
) -> Results:
    """Score the config's model on ``data.eval``, or on one of the sets there.

    Args:
        checkpoint: The model's checkpoint, for the results.
        interruption: Handles signals; by default their handlers stay.

    Raises:
        MMRLError: The config, the data, a plugin or the machine does not allow it.
        Stopped: A signal came; scored groups are kept in ``options.output``.
    """
    interruption = interruption or Interruption()
    config, how = _decided(_with_one_set(config, options.on), options)
    config, chooser = with_chooser(config, options.by)
    kind = prepare_process()
    from mmrl.engine.device import precision

    with ExitStack() as stack:
        name = config.model.path
        config = stack.enter_context(_with_whole_model(config))
        output = None if options.output is None else stack.enter_context(OutputFolder(options.output))
        media = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else output.media
        setup = RunSetup(config, media)
        penalties = setup.penalties
        scorer = stack.enter_context(Scorer(config.rewards))  # its workers import their rewards meanwhile
        (source,) = setup.evaluations.values()
        prompts = source.each(setup.encoder.encode, options.limit)
        settings = _settings(config, how, options, precision(kind, config.model.dtype))
        if output is not None:
            content = {"weights": _weights(setup.folder), **template_fingerprint(setup.folder)}
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
        results = Results(
            model=name,
            checkpoint=checkpoint,
            settings=settings,
            counts=_counts(whole.groups, len(source.dropped)),
            metrics=_estimates(collector, how, whole.groups, whole.metrics),
            sources=_by_source(collector, how, whole.groups),
            ablation=_ablation(collector, how, whole.groups, run(blanks, BLANK_SAMPLES)) if blanks else None,
            best_of=None
            if options.best_of is None
            else best_of(collector.batch(whole.groups), options.best_of, chooser, how.judge),
        )
        if output is not None:
            output.write_results(results.data())
    return results


@contextmanager
def _with_whole_model(config: Config) -> Iterator[Config]:
    """The config of a model that vLLM can load: an adapter is merged, into a folder that is removed in the end."""
    folder = Path(config.model.path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        yield config
        return
    from mmrl.engine.aids.exporting import write_merged

    with tempfile.TemporaryDirectory() as temporary:
        try:
            write_merged(folder, Path(temporary))
        except OSError as error:
            what = f"the adapter cannot be merged: {error.strerror or error}"
            raise ResourceError(what, where=temporary, remedy="make room, or set TMPDIR to a larger disk") from error
        model = config.model.model_copy(update={"path": temporary, "revision": None})
        yield config.model_copy(update={"model": model})


class _OnDemand:
    """The engine, which is started when something is to be sampled, and closed with the stack."""

    def __init__(self, config: Config, setup: RunSetup, interruption: Interruption, stack: ExitStack) -> None:
        self._config, self._setup, self._interruption, self._stack = config, setup, interruption, stack

    def sampling(self) -> AbstractContextManager[Sampler]:
        return self._engine.sampling()

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


def _with_one_set(config: Config, name: str | None) -> Config:
    """The config with the evaluation set of this name alone, or with its only one.

    Raises:
        ConfigError: There is none, none of this name, or none is named and there are several.
    """
    sets = config.data.evaluated
    if not sets:
        raise ConfigError("there is nothing to evaluate on", where="data.eval", remedy="name a dataset")
    if name is None and len(sets) == 1:
        return config
    known = [each for each in sets if each]
    if name is None:
        what = f"data.eval has {len(sets)} sets, and one is evaluated at a time"
        raise ConfigError(what, where="mmrl eval", possible=", ".join(known), remedy=f"name one: --on {known[0]}")
    if name not in known:
        what = f"data.eval has no set {name!r}" if known else "data.eval is one dataset, without a name"
        remedy = suggestion(name, known) if known else "leave out --on"
        raise ConfigError(what, where=f"--on {name}", possible=", ".join(known), remedy=remedy)
    chosen = {name: sets[name]}
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": chosen})})


def _decided(config: Config, options: Options) -> tuple[Config, EvaluationSet]:
    """The config with the options in it, and how its only evaluation set is sampled."""
    for name, value, most in (
        ("samples", options.samples, 4096),
        ("best-of", options.best_of, 4096),
        ("max-new-tokens", options.max_new_tokens, 10**9),
        ("limit", options.limit, None),
    ):
        if value is not None and not 1 <= value <= (most or value):
            up_to = "1 or more" if most is None else f"1 to {most}"
            raise ConfigError(f"--{name} is {value}", where="mmrl eval", possible=up_to)
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
    if known.accuracy is None:
        remedy = "add one: 'rewards=[{name: ...}]'"
        raise ConfigError("evaluation needs at least one reward", where="rewards", remedy=remedy)
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


def _weights(folder: ModelFolder) -> str:
    """A hub model's commit, or a hash of a folder's files, whole: frozen parts may begin and end many of them."""
    if folder.commit is not None:
        return folder.commit
    digest = hashlib.sha256()
    for name in folder.files():
        with (Path(folder.path) / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


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
) -> Estimates:
    batch = collector.batch(groups)
    return estimates(groups, batch, evaluation_metrics(batch, how) if values is None else values, how.judge)


def _by_source(
    collector: Collector, how: EvaluationSet, groups: Sequence[ScoredGroup]
) -> dict[str, tuple[int, Estimates]]:
    found = {}
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
