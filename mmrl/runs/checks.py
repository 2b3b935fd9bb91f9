"""Rules that a config, its model and its prompts have to keep together; each raises ConfigError where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mmrl.config.sections import Config
from mmrl.data.prompts import PromptSource
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm, Needs, View
from mmrl.interfaces.views import members_of_views, try_views
from mmrl.ops.categories import MOST
from mmrl.step.source import Source
from mmrl.token_columns import REFERENCE
from mmrl.types import Prompt

if TYPE_CHECKING:
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.ops.layer_shapes import MixtureShape


def check_rollouts(config: Config, needs: Needs) -> None:
    """See that completions are scored, and as many of a prompt as the algorithm compares."""
    name, needed = config.algorithm.name, needs.min_group_size
    if needs.rewards and not config.rewards and config.environment is None:
        remedy = "add one, or an environment that rewards turns"
        raise ConfigError(f"algorithm {name!r} needs a reward", where="rewards", remedy=remedy)
    if config.sampler.group_size < needed:
        raise ConfigError(
            f"algorithm {name!r} compares the completions of a prompt and needs {needed} of them",
            where=f"sampler.group_size: {config.sampler.group_size}",
            possible=f"{needed} or more",
            remedy="raise sampler.group_size",
        )


def check_given(config: Config, needs: Needs, what: str) -> None:
    """See that the config suits completions of the dataset.

    Args:
        what: The noun for these.
    """
    if config.sampler.temperature != 1.0:
        raise ConfigError(
            f"{what} are learned at temperature 1",
            where=f"sampler.temperature: {config.sampler.temperature}",
            remedy="remove sampler.temperature",
        )
    if config.learner.routing != "own":
        raise ConfigError(
            f"{what} are not sampled, so there are no sampler's experts to compare or to replay",
            where=f"learner.routing: {config.learner.routing}",
            remedy="remove learner.routing",
        )
    if config.learner.minibatches > config.trainer.prompts_per_step:
        raise ConfigError(
            f"learner.minibatches is {config.learner.minibatches}, but a step has fewer "
            f"{'groups' if needs.whole_groups else what}",
            where=f"trainer.prompts_per_step: {config.trainer.prompts_per_step}",
            remedy=f"lower learner.minibatches to {config.trainer.prompts_per_step} or less, or raise "
            "trainer.prompts_per_step",
        )


def check_rewarded(config: Config, source: type[Source]) -> None:
    """See that the rewards and the environment of a run on comparisons are there for its evaluations."""
    unused = [key for key, is_there in (("rewards", config.rewards), ("environment", config.environment)) if is_there]
    if unused and source.compares and not config.data.eval:
        raise ConfigError(
            f"nothing is sampled that {' and '.join(unused)} could score: rows have {source.texts} and scores of their "
            "own, and nothing is evaluated",
            where=", ".join(unused),
            remedy="remove it, set data.eval, or let the algorithm learn from sampled completions",
        )


def check_judged(config: Config, source: type[Source]) -> None:
    """See that evaluations can tell right from wrong."""
    scores = config.rewards or config.environment is not None or source.evaluates_given(config)
    if config.data.eval and not scores:
        raise ConfigError(
            "evaluation needs at least one reward",
            where="data.eval, rewards",
            remedy="add to rewards, or set data.eval: null",
        )


def check_reward_model(config: Config) -> None:
    """See that nothing in the config of a run that trains a reward model asks for completions."""
    unused = {"rewards": ", ".join(spec.metric for spec in config.rewards)} if config.rewards else {}
    unused |= {"environment": config.environment.name} if config.environment is not None else {}
    if config.sampler.temperature != 1.0:
        unused["sampler.temperature"] = str(config.sampler.temperature)
    if unused:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} trains a reward model, which scores answers and writes none",
            where=", ".join(f"{key}: {value}" for key, value in unused.items()),
            remedy=f"remove {', '.join(unused)}",
        )


def check_views(config: Config, algorithm: Algorithm, views: Sequence[View]) -> None:
    """See that the run can have the algorithm's views; each is tried on made-up images.

    Raises:
        PluginError: A view fails, or changes the size of an image though the algorithm compares token by token.
    """
    name, sampled = config.algorithm.name, [view for view in views if view.sampled]
    if sampled and config.environment is not None:
        raise ConfigError(
            f"algorithm {name!r} samples from view {sampled[0].name!r} of a prompt, and episodes are played on the "
            "prompt's own images",
            where="environment",
            remedy="remove environment, or choose an algorithm that samples from no view",
        )
    try:
        members_of_views(views, config.sampler.group_size)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=f"sampler.group_size: {config.sampler.group_size}",
            remedy=f"raise sampler.group_size, or change the share that {name!r} samples from its view",
        ) from error
    try_views(algorithm, views, config.trainer.steps)


def check_reads_images(config: Config, folder: ModelFolder, views: Sequence[View]) -> None:
    """See that the model reads images if the algorithm needs views of them."""
    if views and not folder.family.vision:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} needs views of images, and the model reads text only",
            where=f"model.path: {config.model.path}",
            remedy="choose a vision-language model, or another algorithm",
        )


def check_sampler(config: Config, folder: ModelFolder) -> None:
    """See that vLLM can divide the model's layers among the ranks that sample together."""
    from mmrl.engine.network.shape import model_shape

    size, ranks = config.sampler.tensor_parallel_size, config.cluster.num_sampler_ranks
    stages = config.sampler.pipeline_parallel_size
    shape, whole_tower = model_shape(folder.config), config.sampler.engine.get("mm_encoder_tp_mode") == "data"
    if stages > shape.layers:
        raise ConfigError(
            f"the sampler's layers cannot be divided into {stages} parts: the model has {shape.layers}",
            where=f"sampler.pipeline_parallel_size: {stages}",
            possible=f"1 to {shape.layers}",
            remedy="lower it",
        )
    if reason := shape.indivisible(size, whole_tower=whole_tower):
        sizes = [n for n in range(1, ranks + 1) if ranks % (n * stages) == 0]
        sizes = [n for n in sizes if not shape.indivisible(n, whole_tower=whole_tower)]
        raise ConfigError(
            f"{size} ranks cannot share one copy of the sampler's weights: {reason}",
            where=f"sampler.tensor_parallel_size: {size}",
            possible=f"{', '.join(map(str, sizes))} (with {config.cluster.sampler_key}: {ranks})",
            remedy="set one of these"
            + ("; or sampler.engine.mm_encoder_tp_mode: data, a whole tower on each rank" * ("tower" in reason)),
        )
    _check_experts(config, folder, shape.mixture)


def check_sequences(config: Config, *folders: ModelFolder) -> None:
    """See that the ranks that share a row can divide the heads of every network that computes it.

    Args:
        folders: Those of the policy, or the reward model that is trained, and of teachers or a critic.
    """
    from mmrl.engine.network.shape import model_shape
    from mmrl.ops.sequence import possible_sizes, repeated_heads, undivided

    size, cluster = config.learner.sequence_parallel_size, config.cluster
    shapes = {f"{folder.key}.path: {folder.name}": model_shape(folder.config) for folder in folders}
    for where, shape in shapes.items():
        if not (reason := undivided(shape, size)):
            continue
        possible = list[str]()
        for each in possible_sizes(shapes.values(), cluster.num_learner_ranks):
            repeated = [clause for other in shapes.values() for clause in repeated_heads(other, each)]
            possible.append(f"{each} ({'; '.join(dict.fromkeys(repeated))})" if repeated else str(each))
        raise ConfigError(
            f"{size} ranks cannot divide the heads of a network whose rows they share: {reason}",
            where=f"learner.sequence_parallel_size: {size}; {where}",
            possible=f"{', '.join(possible)}; with {cluster.learner_key}: {cluster.num_learner_ranks}",
            remedy="set one of these",
        )


def _check_experts(config: Config, folder: ModelFolder, mixture: MixtureShape | None) -> None:
    """See that the model has experts if the config wants something of them."""
    learner = config.learner
    wants = {"router_aux_loss_coef": learner.router_aux_loss_coef > 0, "routing": learner.routing != "own"}
    for key in (key for key, wanted in wants.items() if wanted and mixture is None):
        raise ConfigError(
            f"a model of type {folder.family.model_type} has no experts",
            where=f"learner.{key}: {getattr(learner, key)}",
            remedy=f"remove learner.{key}, or choose a mixture of experts",
        )


def check_trainable(config: Config, folder: ModelFolder) -> None:
    """See that the model's weights are not quantised already."""
    if (method := folder.quantized_by) is not None:
        raise ConfigError(
            f"the model's weights are stored quantised ({method}), and such weights cannot be trained",
            where=f"model.path: {config.model.path}",
            possible="a model with weights in bfloat16, float16 or float32",
            remedy="name the model that it was quantised from; beside model.lora, model.quantize: nf4 keeps that "
            "one's weights in 4 bits",
        )


def check_frozen(config: Config, folder: ModelFolder) -> None:
    """See that the model has the parts that are not trained, and another one."""
    parts, frozen = set(folder.family.parts), set(config.model.freeze)
    if not frozen < parts:
        raise ConfigError(
            f"a model of type {folder.family.model_type} cannot be frozen in {', '.join(sorted(frozen))}",
            where="model.freeze",
            possible=f"some of {', '.join(sorted(parts))}, but not all",
        )


def check_quantization(config: Config, folder: ModelFolder) -> None:
    """See that the model can be quantised, if the config asks for it."""
    check_trainable(config, folder)
    if config.model.quantize is not None:
        from mmrl.engine.network.quantization import check_installed

        check_installed()


def check_reference(config: Config, needs: Needs) -> None:
    """See that the algorithm asks for a reference, if the config says which."""
    reference = config.reference
    named = [f"{each.key}.path: {each.path}" for each in reference.models]
    named += [] if reference.reset_every is None else [f"reference.reset_every: {reference.reset_every}"]
    if named and REFERENCE not in needs.roles:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} asks for no reference's log-probs, so none would be used",
            where=", ".join(named),
            possible="an algorithm that needs one; for those with a penalty, algorithm.kl.coef above 0",
            remedy="choose one of these, or remove the section reference",
        )


def check_critic(config: Config, needs: Needs) -> None:
    """See that there is a critic if the algorithm asks for its values, and none that nothing would use."""
    name = config.algorithm.name
    if needs.values and config.critic is None:
        raise ConfigError(
            f"algorithm {name!r} asks for a critic's values, and the config has no section critic",
            where=f"algorithm.name: {name}",
            possible="critic: {lr: 1.0e-5} begins from the policy's model; critic.path names another, such as a reward "
            "model",
            remedy="add the section critic, or choose an algorithm that asks for none",
        )
    if config.critic is not None and not needs.values:
        raise ConfigError(
            f"algorithm {name!r} asks for no critic, so none would be trained",
            where="critic",
            possible="an algorithm that asks for a critic's values; the page of plugins says which do",
            remedy="choose one of these, or remove the section critic",
        )


def check_taught(config: Config, teachers: Sequence[ModelFolder], prompt: Prompt) -> None:
    """See that a row has a teacher, if there are any, and one that can read its images.

    Raises:
        ConfigError: There is none for its source, or it reads text alone.
    """
    taught = [(each, folder) for each, folder in zip(config.reference.models, teachers, strict=True)]
    own = [(each, folder) for each, folder in taught if each.teaches(prompt.source)]
    if taught and not own:
        raise ConfigError(
            f"no teacher teaches rows of {prompt.source}",
            where=f"reference.teachers: sources; row {prompt.id}",
            possible=", ".join(sorted({source for each, _ in taught for source in each.sources or ()})),
            remedy="add the source to a teacher's, or add a teacher for it",
        )
    for each, folder in own:
        observes = config.environment is not None and config.environment.max_images > 0
        if (prompt.images or observes) and not folder.family.vision:
            raise ConfigError(
                f"the teacher reads text alone, and rows of {prompt.source} have images",
                where=f"{each.key}.path: {each.path}; row {prompt.id}",
                possible="a teacher of the policy's family; a text model for rows without images",
                remedy="choose a teacher that reads images, or give it sources without any",
            )


def check_taught_sources(config: Config, training: PromptSource) -> None:
    """See that each source that a teacher names is there."""
    named = {source for each in config.reference.models for source in each.sources or ()}
    if training.is_scanned and (missing := sorted(named - training.sources.keys())):
        raise ConfigError(
            f"teachers are meant for rows of {', '.join(missing)}, and there are none",
            where=f"reference.teachers: sources; {training.name}",
            possible=", ".join(sorted(training.sources)),
            remedy="name labels of datasets, or what the rows themselves say that they are from",
        )


def check_ahead(config: Config, folder: ModelFolder, num_rows: int, *, samples: bool) -> None:
    """Check that a run may begin without reading its training rows.

    Args:
        samples: True if the run samples anything.

    Raises:
        ConfigError: Nobody says how many images a prompt may have.
    """
    data = config.data
    if data.max_images is None and folder.family.vision:
        use = "for which the sampler reserves memory" if samples else "of which the audit of the start makes its own"
        raise ConfigError(
            f"data.max_images is not set, and {num_rows} training rows are not read before the run starts, so that "
            f"nobody knows how many images a prompt has, {use}",
            where=f"data.max_images: null; data.scan_rows: {data.scan_rows}",
            possible="the most images of a prompt, such as 1; rows with more are left out",
            remedy=f"set data.max_images; or data.scan_rows: {num_rows} for a new run, which then reads all rows",
        )


def check_lengths(config: Config, folder: ModelFolder, source: PromptSource) -> None:
    """Check that the model reads the longest prompt that may come with all that may follow it."""
    allowed, (follows, limit) = config.data.max_prompt_tokens, _longest_answer(config, source.name)
    most = folder.max_tokens
    if allowed + follows <= most:
        return
    is_episode = config.environment is not None
    after, key = ("episodes", "environment.max_tokens") if is_episode else ("completions", limit)
    longest = source.longest if source.is_scanned else allowed
    if longest + follows <= most:
        remedy = f"set data.max_prompt_tokens: {most - follows}"
    elif longest < most:
        remedy = f"set data.max_prompt_tokens: {longest} and {key}: {most - longest} or less"
    else:
        remedy = f"set data.max_prompt_tokens below {most}, which leaves longer prompts out, and {key} to the rest"
    raise ConfigError(
        f"prompts and {after} may take {allowed + follows} tokens, and the model reads {most}",
        where=f"data.max_prompt_tokens = {allowed}; {after} may take {follows} ({key})"
        + (f"; the longest prompt of {source.name} has {longest} tokens" if source.is_scanned else ""),
        remedy=remedy,
    )


def _longest_answer(config: Config, name: str) -> tuple[int, str]:
    """Most tokens after a prompt of a dataset, and the key that says so where there is no environment."""
    own = next((each for each in config.evaluations.values() if each.key == name), None)
    if own is None or own.max_new_tokens == config.sampler.max_new_tokens:
        return config.max_completion_tokens, "sampler.max_new_tokens"
    return own.max_new_tokens, f"{own.key}.max_new_tokens"


def check_categories(source: PromptSource) -> None:
    """Check that an evaluation has few categories: each is a metric."""
    if (count := len(set(source.categories) - {""})) > MOST:
        first = ", ".join(sorted(source.categories.keys() - {""})[:3])
        raise ConfigError(
            f"the rows of {source.name} are of {count} categories, such as {first}, and each would be a metric",
            where=f"{source.name}.category",
            possible=f"at most {MOST} categories",
            remedy="name a column with fewer, or remove it",
        )


def check_scored(config: Config, source: PromptSource) -> None:
    """Check that each row has a reward that scores it."""
    named = [reward.sources for reward in config.rewards]
    if None in named or config.environment is not None:  # which scores every row
        return
    scored = {name for names in named if names is not None for name in names}
    if missing := sorted(source.sources.keys() - scored):
        raise ConfigError(
            f"no reward scores the rows of {', '.join(missing)}",
            where=f"rewards: sources; {source.name} has rows of {_counted(source.sources)}",
            possible=f"rewards for {', '.join(sorted(scored))}, and for {', '.join(missing)}",
            remedy="add them to the sources of a reward, or leave out the sources of one that scores every row",
        )


def check_reward_sources(
    config: Config, training: PromptSource, evaluations: Callable[[], Iterable[PromptSource]]
) -> None:
    """Check that each source that a reward names is there.

    Args:
        evaluations: Makes the prompts of all evaluation sets, which may take long.
    """
    if not training.is_scanned:  # its rows may name sources of their own
        return
    data = config.data
    known = {spec.source for spec in (data.train, *data.mix, *data.evaluated.values())}
    known |= training.sources.keys()
    named = {name for reward in config.rewards for name in reward.sources or ()}
    if named - known:
        known |= {name for evaluated in evaluations() for name in evaluated.sources}
    if missing := sorted(named - known):
        raise ConfigError(
            f"rewards are meant for rows of {', '.join(missing)}, and there are none",
            where="rewards: sources",
            possible=", ".join(sorted(known)),
            remedy="name labels of datasets, or what the rows themselves say that they are from",
        )


def _counted(counts: Mapping[str, int]) -> str:
    """Counts as a text such as ``geometry (40), digits (2)``."""
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
