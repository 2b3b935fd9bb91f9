"""Rules for runs whose sampler does not wait for its learner, or samples rollouts in parts."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm, Needs
from mmrl.policy_gradient import PolicyGradient
from mmrl.step.gather import state_of
from mmrl.step.source import Source


def check_asynchrony(config: Config, algorithm: Algorithm, needs: Needs, source: type[Source]) -> None:
    """See that the algorithm suits ranks of its own that sample, ``trainer.staleness`` and ``sampler.partial``.

    Raises:
        ConfigError: It does not.
    """
    if not source.samples:
        _check_samples(config, source)
    if config.sampler.partial is not None:
        _check_partial(config, needs)
    if config.trainer.staleness and config.learner.routing != "own":
        raise ConfigError(
            f"learner.routing is {config.learner.routing}, and a checkpoint holds batches to learn from, without the "
            "sampler's experts",
            where=f"trainer.staleness: {config.trainer.staleness}",
            possible="trainer.staleness: 0; learner.routing: own",
            remedy="remove one of them",
        )
    asked = {"selects groups": needs.refill, "chooses where episodes branch": needs.branches}
    does = " and ".join(what for what, need in asked.items() if need is not None)
    if config.trainer.staleness and does and _keeps_state(algorithm):
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} {does} and has a state: it would do so with the state of whichever "
            "step is learned just then",
            where=f"trainer.staleness: {config.trainer.staleness}",
            possible="trainer.staleness: 0; an algorithm that does so without a state",
            remedy="remove trainer.staleness, or choose another algorithm",
        )


def _keeps_state(algorithm: Algorithm) -> bool:
    """True if the algorithm has a state, or may have one later."""
    return type(algorithm).state not in (Algorithm.state, PolicyGradient.state) or bool(state_of(algorithm))


def _check_samples(config: Config, source: type[Source]) -> None:
    """See that a run whose steps sample nothing has no sampler of its own."""
    cluster, partial = config.cluster, config.sampler.partial
    asked, possible = dict[str, str](), list[str]()
    if cluster.is_split:
        asked["cluster.sampler_ranks"] = str(cluster.sampler_ranks)
        possible.append(f"cluster.ranks: {cluster.num_ranks}")
    if partial is not None:
        asked["sampler.partial.engine_steps"] = str(partial.engine_steps)
        possible.append("sampler.partial: null")
    if asked:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} learns from {source.texts} of the dataset, and its steps sample "
            "nothing",
            where=", ".join(f"{key}: {value}" for key, value in asked.items()),
            possible="; ".join(possible),
            remedy=f"remove {', '.join(key.removesuffix('.engine_steps') for key in asked)}",
        )


def _check_partial(config: Config, needs: Needs) -> None:
    """See that the algorithm's rollouts can be sampled in parts."""
    sampled = [view.name for view in needs.views if view.sampled]
    what = f"samples from view {sampled[0]!r} of a prompt" if sampled else ""
    what = "compares each completion with a greedy one" if needs.greedy_rollout else what
    if what:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} {what}, and that is not sampled in parts",
            where=f"sampler.partial.engine_steps: {config.sampler.partial and config.sampler.partial.engine_steps}",
            possible="sampler.partial: null; an algorithm whose completions are all sampled alike",
            remedy="remove sampler.partial, or choose another algorithm",
        )
