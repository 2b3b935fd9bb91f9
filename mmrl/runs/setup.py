"""A run's parts that need no device: its plugins, model files and prompts, made from a config and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mmrl.config.plugin_specs import DatasetSpec
from mmrl.config.sections import Config
from mmrl.data.ahead import PromptsAhead
from mmrl.data.images import MediaStore
from mmrl.data.prompts import DatasetRows, Progress, PromptSource
from mmrl.errors import ConfigError, plugin_errors, plural
from mmrl.interfaces import Algorithm, Reward, served_needs
from mmrl.plugin_host import registry
from mmrl.plugin_host.used import own_code
from mmrl.rollout.episodes.process import EnvironmentFacts
from mmrl.runs import asynchrony, branches, checks, members
from mmrl.runs.dataset import Dataset
from mmrl.runs.environment import checked_facts
from mmrl.runs.resumption import DATA, MODEL, model_fingerprint, template_fingerprint
from mmrl.step.gather import SOURCES
from mmrl.step.source import Source, check_question
from mmrl.system.report import rows
from mmrl.token_columns import REWARD

if TYPE_CHECKING:
    from mmrl.engine.device import DeviceKind
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.spec import EngineSpec
    from mmrl.engine.text.encoding import Encoder
    from mmrl.types import Prompt


class RunSetup:
    """Everything of a run that needs no device, made when it is first asked for.

    Args:
        media_folder: The folder of normalised images.
        with_weights: True if a model's folder must hold its weights.
        scans: True if every training row is read at the start, however many there are; False if none is, however few;
            None goes by ``data.scan_rows``.
        progress: Told of the rows that were read.

    Attributes:
        length: The key that says how long the run is: trainer.steps or trainer.epochs.
        loaded: Each dataset that was loaded, by its key.
    """

    def __init__(
        self,
        config: Config,
        media_folder: Path,
        *,
        with_weights: bool = True,
        scans: bool | None = None,
        progress: Progress = lambda phase, done, total: None,
    ) -> None:
        self.config, self._media_folder, self._with_weights = config, media_folder, with_weights
        self.length = "trainer.steps" if config.trainer.epochs is None else "trainer.epochs"
        self._scans, self._progress = scans, progress
        self.loaded: dict[str, Dataset] = {}

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, its needs checked against the config."""
        from mmrl.engine.learner.learner_settings import check_settings

        check_settings(self.config.learner)
        if self.config.sampler.name == "vllm":
            from mmrl.engine.sampler.vllm_arguments import check_engine_keys

            check_engine_keys(self.config.sampler.engine)
        algorithm = registry.create("algorithm", self.config.algorithm)
        needs = served_needs(algorithm)
        with plugin_errors(algorithm, "aggregation"):
            _ = algorithm.aggregation
        if algorithm.network == REWARD:
            checks.check_reward_model(self.config)
        if (source := SOURCES[algorithm.source]).samples:
            checks.check_rollouts(self.config, needs)
        else:
            checks.check_given(self.config, needs, source.texts)
            checks.check_rewarded(self.config, source)
        checks.check_critic(self.config, needs)
        asynchrony.check_asynchrony(self.config, algorithm, needs, source)
        checks.check_judged(self.config, source)
        checks.check_views(self.config, algorithm, needs.views)
        branches.check_branches(self.config, needs)
        members.check_members(self.config, algorithm, needs)
        return algorithm

    @property
    def step_source(self) -> type[Source]:
        """The strategy that gives a step its samples."""
        return SOURCES[self.algorithm.source]

    @cached_property
    def penalties(self) -> frozenset[str]:
        """Names of the rewards that are penalties."""
        kinds: dict[str, set[bool]] = {}
        for spec in self.config.rewards:
            kinds.setdefault(spec.metric, set()).add(cast(type[Reward], registry.resolve("reward", spec)).penalty)
        for name in (name for name, found in kinds.items() if len(found) > 1):
            raise ConfigError(
                f"one of the rewards called {name!r} is a penalty, and another is none",
                where="rewards",
                remedy="give them labels of their own",
            )
        return frozenset(name for name, found in kinds.items() if found == {True})

    @cached_property
    def folder(self) -> ModelFolder:
        from mmrl.engine.network.features import asked_features
        from mmrl.engine.network.folder import ModelFolder
        from mmrl.engine.network.template import TemplateChoice

        model = self.config.model
        folder = ModelFolder.open(
            model.path,
            model.revision,
            trust_remote_code=model.trust_remote_code,
            with_weights=self._with_weights,
            template=TemplateChoice.of(self.config),
        )
        if (error := folder.family.refusal(asked_features(self.config), None, None)) is not None:
            raise error
        checks.check_sampler(self.config, folder)
        checks.check_sequences(self.config, folder)
        checks.check_frozen(self.config, folder)
        return folder

    @cached_property
    def teachers(self) -> tuple[ModelFolder, ...]:
        """The teachers' folders, in the order of ``reference.teachers``; none if the reference is the initial policy.

        Raises:
            ConfigError: One cannot be opened, or does not agree with the policy.
        """
        from mmrl.engine.network.teacher import open_teacher

        checks.check_reference(self.config, self.algorithm.needs())
        pixels = self.config.data.min_pixels, self.config.data.max_pixels
        folders = tuple(
            open_teacher(each, self.folder, pixels, with_weights=self._with_weights)
            for each in self.config.reference.models
        )
        checks.check_sequences(self.config, self.folder, *folders)
        return folders

    @cached_property
    def critic(self) -> ModelFolder | None:
        """The folder that ``critic.path`` names; None if there is no critic, or it begins from the policy's folder.

        Raises:
            ConfigError: It cannot be opened, does not agree with the policy, or has a head that does not fit.
        """
        from mmrl.engine.network.teacher import open_critic

        _ = self.algorithm  # first what the config lacks
        if self.config.critic is None:
            return None
        pixels = self.config.data.min_pixels, self.config.data.max_pixels
        folder = open_critic(self.config.critic, self.folder, pixels, with_weights=self._with_weights)
        if folder is not None:
            checks.check_sequences(self.config, self.folder, folder)
        return folder

    @cached_property
    def media(self) -> MediaStore:
        data = self.config.data
        return MediaStore(self._media_folder, self.folder.image_sizes(data.min_pixels, data.max_pixels))

    @cached_property
    def encoder(self) -> Encoder:
        from mmrl.engine.text.encoding import Encoder

        if (spec := self.config.environment) is None or self.environment is None:
            return Encoder(self.folder, self.media)
        encoder = Encoder(
            self.folder,
            self.media,
            tools=self.environment.tools,
            observation_role=spec.observation_role,
            tool_prompt=spec.tool_prompt,
            keep_thoughts=spec.keep_thoughts,
            keeps_images=True,
        )
        encoder.check_turns(images=spec.max_images > 0)
        return encoder

    @cached_property
    def environment(self) -> EnvironmentFacts | None:
        """The environment's facts; None without one.

        Raises:
            MMRLError: It cannot be made, or does not go with the config.
        """
        return checked_facts(self.config)

    @cached_property
    def training(self) -> PromptSource:
        """The training prompts, enough for one step."""
        self.prompts.require(self.config.trainer.prompts_per_step, "trainer.prompts_per_step")
        return self.prompts

    def count_steps(self, num_rows: int | None = None) -> Config:
        """The config with ``trainer.steps``, also where ``trainer.epochs`` leaves their number to the data.

        Args:
            num_rows: Rows of an epoch; by default those of the training prompts.

        Raises:
            ConfigError: They are too few for the warm-up, or for the steps in which the critic alone learns.
        """
        trainer, learner = self.config.trainer, self.config.learner
        if trainer.epochs is None:
            return self.config
        num_rows = len(self.training) if num_rows is None else num_rows
        drawn = Fraction(str(trainer.epochs)) * num_rows  # exactly 1.1, and not the float beside it
        steps = math.ceil(drawn / trainer.prompts_per_step)
        where = f"trainer.epochs: {trainer.epochs:g} of {plural(num_rows, 'row')} make {plural(steps, 'step')}"
        counted = trainer.model_copy(update={"steps": steps, "epochs": None})
        config = self.config.model_copy(update={"trainer": counted})
        for _, what, remedy in () if config.critic is None else config.critic.against(adapters=False, steps=steps):
            raise ConfigError(what, where=where, remedy=remedy)
        if learner.warmup_steps >= config.policy_updates:
            raise ConfigError(
                f"learner.warmup_steps is {learner.warmup_steps}, but the run has only "
                f"{plural(config.policy_updates, 'optimizer step')}",
                where=where,
                remedy="warm up for fewer optimizer steps than there are",
            )
        self.config = config
        return config

    @cached_property
    def prompts(self) -> PromptSource:
        """The training prompts, however few."""
        data, needs = self.config.data, self.algorithm.needs()
        scored = self.step_source.samples and needs.rewards
        checks.check_reads_images(self.config, self.folder, needs.views)
        branches.check_repeatable(self.config, needs, self.environment)
        source = self._source((data.train, *data.mix), "data.train", scored=scored)
        checks.check_reward_sources(self.config, source, lambda: self.evaluations.values())
        checks.check_taught_sources(self.config, source)
        return source

    @cached_property
    def evaluations(self) -> Mapping[str, PromptSource]:
        """The prompts of each evaluation set, by its name."""
        sets = self.config.evaluations
        scored = not self.evaluates_given
        return {name: self._source((each.spec,), each.key, scored=scored) for name, each in sets.items()}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the model's files and template, of prompts, and of the user's own code by path or module."""
        results = [(kind, spec) for _, kind, spec in self.config.plugins() if kind != "tracker"]
        code = {name: version for kind, spec in results for name, version in own_code(kind, spec).items()}
        evaluated = {source.name: source.fingerprint for source in self.evaluations.values()}
        model = {MODEL: model_fingerprint(self.folder), **template_fingerprint(self.folder)}
        others = [*self.teachers, *([] if self.critic is None else [self.critic])]
        model |= {f"{each.key}.path": model_fingerprint(each) for each in others}
        return {**model, DATA: self.training.fingerprint, **evaluated, **code}

    @property
    def evaluates_given(self) -> bool:
        """True if evaluations judge the completions of held-out rows, and sample nothing.

        Where rewards score, the algorithm is not asked: an evaluation alone does without it.
        """
        return self.config.accuracy is None and self.step_source.evaluates_given(self.config)

    def loaded_for(self, name: str) -> dict[str, Dataset]:
        """The datasets of a source, by their keys: of data.train with its mixture, or of an evaluation set."""
        own = ("data.train", "data.mix.") if name == "data.train" else ()
        return {key: each for key, each in self.loaded.items() if key == name or key.startswith(own)}

    @property
    def trains_reward_model(self) -> bool:
        """True if a reward model is trained, and no policy."""
        return self.algorithm.network == REWARD

    @property
    def targets(self) -> str:
        """A clause on what is learned of rows that have completions, for a person."""
        if self.trains_reward_model:
            return "are scored after the last token of the whole conversation"
        return self.encoder.targets

    @property
    def with_sampler(self) -> bool:
        """True if anything is sampled."""
        return self.step_source.samples or (self.config.data.eval is not None and not self.evaluates_given)

    @property
    def reading(self) -> str:
        """How the training rows are read, and why, for a person."""
        source, most = self.prompts, self.config.data.scan_rows
        how = "all were measured at the start" if source.is_scanned else "each is measured when it is reached"
        why = f"data.scan_rows is {most}" if self._scans is None else "as when the run began"
        return f"{rows(source.num_rows)}; {how} ({why})"

    @property
    def max_images(self) -> int:
        """Most images in one prompt."""
        return max(source.max_images for source in (self.prompts, *self.evaluations.values()))

    def engine_spec(self, algorithm: Algorithm, checkpoint: Path | None = None) -> EngineSpec:
        """The parts that the run's engine is made of.

        Args:
            algorithm: A new instance.
            checkpoint: The one to go on from.
        """
        from mmrl.engine.spec import EngineSpec

        args = self.config, self.folder, self.media, algorithm, self.max_images, self.with_sampler, checkpoint
        return EngineSpec(*args, teachers=self.teachers, critic=self.critic)

    def num_rows(self, key: str, spec: DatasetSpec) -> int:
        """Rows of a dataset as its loader gives them, which needs no model."""
        return len(self._load(key, spec).rows)

    @cached_property
    def num_adapter_weights(self) -> int | None:
        """Parameters of the adapters; None if the weights themselves are trained.

        Raises:
            ConfigError: The model cannot be trained, or ``model.lora.targets`` names modules that it lacks.
            ResourceError: ``model.quantize`` needs a package that is not installed.
        """
        checks.check_quantization(self.config, self.folder)
        if self.config.model.lora is None:
            return None
        return sum(trained for trained, _ in self.part_sizes.values())

    @cached_property
    def part_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Trained and frozen parameters of each part of the model, without its weights.

        Raises:
            ConfigError: The model cannot be trained, or ``model.lora.targets`` names modules that it lacks.
        """
        from mmrl.engine.network.sizes import part_sizes

        checks.check_trainable(self.config, self.folder)
        model = self.config.model
        return part_sizes(self.folder, model.freeze, model.lora, scores=self.algorithm.network == "reward")

    def num_saved(self) -> int | None:
        """Parameters that a checkpoint holds of all networks that are trained; None if they are not known."""
        count = self.num_weights()
        if count is None or not self.algorithm.needs().values:
            return count
        from mmrl.engine.trained_sizes import saved_of_critic

        return count + saved_of_critic(self.config, self.critic or self.folder)

    def num_weights(self) -> int | None:
        """Parameters that a checkpoint holds of the policy, from the files' headers; None if they are not here."""
        if self.num_adapter_weights is not None:
            return self.num_adapter_weights
        from safetensors import safe_open

        count = 0
        for name in self.folder.files():
            if name.endswith(".safetensors"):
                with safe_open(Path(self.folder.path) / name, "np") as file:
                    count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        return count or None

    def _source(self, specs: Sequence[DatasetSpec], name: str, *, scored: bool) -> PromptSource:
        data = self.config.data
        keys = [name, *(f"data.mix.{index}" for index in range(len(specs) - 1))]
        loaded = [self._load(key, spec) for key, spec in zip(keys, specs, strict=True)]
        kind = PromptSource if name != "data.train" else self._kind(sum(len(each.rows) for each in loaded))
        given = name == "data.train" or self.evaluates_given
        prints = ["" if kind is PromptSource else each.fingerprint() for each in loaded]
        source = kind(
            [
                DatasetRows(spec.source, each.rows, spec.weight, fingerprint, each.notes)
                for spec, each, fingerprint in zip(specs, loaded, prints, strict=True)
            ],
            self.encoder,
            system_prompt=data.system_prompt,
            prompt_template=data.prompt_template,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong,
            on_bad_row=data.on_bad_row,
            max_bad_rows=data.max_bad_rows,
            max_images=data.max_images,
            check=self._check_row if given else check_question,
            reads_images=self.folder.family.vision,
            name=name,
            progress=self._progress,
        )
        checks.check_lengths(self.config, self.folder, source)
        if name != "data.train":
            checks.check_categories(source)
        if scored:
            checks.check_scored(self.config, source)
        return source

    def _check_row(self, prompt: Prompt) -> None:
        """See that the algorithm can learn from a training row, and that a teacher can read it."""
        checks.check_taught(self.config, self.teachers, prompt)
        self.step_source.check_row(prompt, self.config, self.algorithm.needs(), self.encoder)

    def _kind(self, num_rows: int) -> type[PromptSource]:
        """The way to read so many training rows."""
        if num_rows <= self.config.data.scan_rows if self._scans is None else self._scans:
            return PromptSource
        checks.check_ahead(self.config, self.folder, num_rows, samples=self.with_sampler)
        return PromptsAhead

    def _load(self, key: str, spec: DatasetSpec) -> Dataset:
        dataset = self.loaded[key] = Dataset(spec, self.config.data.image_root)
        return dataset

    def refusal_on(self, kind: DeviceKind) -> ConfigError | None:
        """The error with which a run ends on a kind of device, though its config fits the model."""
        from mmrl.engine.refusals import device_refusal

        return device_refusal(self.folder, self.config, kind, samples=self.with_sampler)
