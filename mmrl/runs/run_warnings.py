"""Warnings about a run before it starts, each with the key that it is about."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.yaml_tree import join_errors, to_flow
from mmrl.errors import ConfigError, DataError, plugin_errors
from mmrl.interfaces import Plugin, RunFacts
from mmrl.plugin_host import registry
from mmrl.runs.dataset import texts
from mmrl.runs.monitoring import judges_of
from mmrl.runs.reward_scale import weight_warnings
from mmrl.runs.setup import RunSetup
from mmrl.token_columns import REFERENCE
from mmrl.types import ENVIRONMENT

LORA_RATE = 1e-5
"""Learning rates of adapters begin here; those of whole weights end here."""


def config_warnings(setup: RunSetup) -> list[str]:
    """Warnings of the plugins about such a run, and those about settings that seldom go together.

    Raises:
        ConfigError: Options of plugins do not go together with the run's; names all of them at once.
    """
    config, facts = setup.config, run_facts(setup)
    warnings, errors = list[str](), list[ConfigError]()
    for where, plugin in _checking_plugins(setup):
        with plugin_errors(plugin, "check"):
            try:
                warnings += [f"{where}: {warning}" for warning in texts(plugin.check(facts))]
            except ValueError as error:
                errors.append(ConfigError(str(error), where=where))
    if errors:
        raise join_errors(errors)
    rate = config.learner.lr
    if config.model.lora is not None and rate < LORA_RATE:
        warnings.append(f"learner.lr: {rate:g} moves adapters little; {LORA_RATE:g} to 2e-4 are usual with model.lora")
    warnings += [*_reference_warnings(setup), *weight_warnings(setup)]
    adapts, stage = config.model.lora is not None, config.learner.zero_stage
    if (critic := config.critic) and adapts and not (critic.path or critic.shares_base(adapts, stage)):
        what = "gives the critic a copy of the policy's weights: below 3 its adapters are on the policy's own"
        warnings.append(f"learner.zero_stage: {stage} {what}")
    partial, longest = config.sampler.partial, config.sampler.max_new_tokens
    if partial is not None and config.environment is None and partial.engine_steps >= longest:
        what = f"a completion of sampler.max_new_tokens, {longest}, is finished in as many steps, so none is cut but "
        what += "those that wait for room; set it lower, or sampler.partial: null"
        warnings.append(f"sampler.partial.engine_steps: {partial.engine_steps}: {what}")
    if config.environment is not None and config.environment.scheduling == "eager":
        what = "what shares a batch depends on the clock, so the run, or a resumed one, does not repeat to the bit"
        warnings.append(f"environment.scheduling: eager: {what}")
    return warnings


def _reference_warnings(setup: RunSetup) -> list[str]:
    """A warning that an algorithm which learns from the reference, and from no reward, has the policy itself as one."""
    needs, config = setup.algorithm.needs(), setup.config
    reference, own = config.reference, (config.model.path, config.model.revision)
    is_sole_signal = REFERENCE in needs.roles and not needs.rewards and setup.step_source.samples
    if (
        not is_sole_signal
        or reference.reset_every
        or any((each.path, each.revision) != own for each in reference.models)
    ):
        return []
    which = f"{own[0]} is the policy's own folder" if reference.models else "null is the policy as it is at the start"
    why = f"{config.algorithm.name} learns from the reference alone, so the policy is held where it is"
    return [f"reference.path: {which}, and {why}; name another model, a teacher"]


def model_warnings(setup: RunSetup) -> list[str]:
    """Warnings about settings of the config that the model or the device cannot follow."""
    from mmrl.engine.device import detect, lacks_state_kernels, overruled
    from mmrl.engine.network.shape import model_shape

    family, sampler, warnings = setup.folder.family, setup.config.sampler, list[str]()
    if setup.config.learner.share_prefix == "auto" and not family.shares_prefix:
        what = f"models of type {family.model_type} cannot share a prompt: each completion is packed with its own"
        warnings.append(f"learner.share_prefix: {what}")
    for key, value in overruled(detect(), sampler.engine).items() if setup.with_sampler else ():
        what = f"is for GPUs, and vLLM for CPUs fails with it, so here it is {to_flow(value)}"
        warnings.append(f"sampler.engine.{key}: {to_flow(sampler.engine[key])} {what}")
    if model_shape(setup.folder.config).linear is not None and lacks_state_kernels(detect()):
        what = "the learner computes linear attention in plain torch, which is slow on a GPU"
        warnings.append(f"model.path: {what}; its kernels come with `pip install flash-linear-attention`")
    return warnings


def image_warnings(setup: RunSetup) -> list[str]:
    """Warnings that training rows have no image, though the model reads images or evaluation rows have some."""
    observes = setup.config.environment is not None and setup.config.environment.max_images > 0
    if not setup.prompts.is_scanned or setup.prompts.max_images or observes:
        return []
    remedy = "if there are pictures, name their column (data.train.images)"
    if pictured := [source.name for source in setup.evaluations.values() if source.max_images]:
        return [f"data.train: no row has an image, and rows of {', '.join(pictured)} have: {remedy}"]
    if not setup.folder.family.vision:
        return []
    model = setup.folder.family.model_type
    return [f"data.train: no row has an image, and the model ({model}) reads images: {remedy}"]


def learning_warnings(setup: RunSetup) -> list[str]:
    """Warnings of the algorithm about the training rows, if all were read at the start.

    Raises:
        DataError: It cannot learn from them.
    """
    source, algorithm = setup.training, setup.algorithm
    if not source.is_scanned:
        return []
    where = f"algorithm: {setup.config.algorithm.name}, {source.name}"
    with plugin_errors(algorithm, "check_rows"):
        try:
            warnings = texts(algorithm.check_rows(source[place] for place in range(len(source))))
        except ValueError as error:
            raise DataError(str(error), where=where) from error
    return [f"{where}: {warning}" for warning in warnings]


def run_facts(setup: RunSetup) -> RunFacts:
    """The facts that plugins' checks are told."""
    config, environment = setup.config, setup.environment
    components = () if environment is None else (ENVIRONMENT, *environment.components)
    return RunFacts(
        group_size=config.sampler.group_size,
        prompts_per_step=config.trainer.prompts_per_step,
        max_new_tokens=config.sampler.max_new_tokens,
        updates_per_batch=config.learner.minibatches * config.learner.epochs,
        rewards=(*dict.fromkeys(spec.metric for spec in config.rewards), *components),
        accuracy=config.accuracy,
        evaluations=judges_of(config),
        staleness=config.trainer.staleness,
        partial=config.sampler.partial is not None,
    )


def _checking_plugins(setup: RunSetup) -> Iterator[tuple[str, Plugin]]:
    """The plugins that check a run, each with its key and name.

    The others are not made for it: a reward, which else lives in worker processes alone, may be large.
    """
    yield f"algorithm: {setup.config.algorithm.name}", setup.algorithm
    for key, kind, spec in setup.config.plugins():
        if kind != "algorithm" and registry.resolve(kind, spec).check is not Plugin.check:
            yield f"{key}: {spec.name}", registry.create(kind, spec)
