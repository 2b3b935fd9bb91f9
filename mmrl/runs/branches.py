"""Rules for runs whose episodes go on from others of their group."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.errors import ConfigError
from mmrl.interfaces import Needs
from mmrl.rollout.episodes.process import EnvironmentFacts


def check_branches(config: Config, needs: Needs) -> None:
    """See that a run can have the branches that its algorithm asks for, before its environment is made.

    Raises:
        ConfigError: There is no environment, rollouts are sampled in parts, or a group is too small.
    """
    name, branches, size = config.algorithm.name, needs.branches, config.sampler.group_size
    if branches is None:
        return
    what = f"algorithm {name!r} lets episodes go on from turns of others"
    if config.environment is None:
        raise ConfigError(
            f"{what}, and a completion has no turns",
            where="environment: null",
            remedy="add an environment, or choose another algorithm",
        )
    if config.sampler.partial is not None:
        raise ConfigError(
            f"{what}, which are over before; in parts, a step ends while some are under way",
            where=f"sampler.partial.engine_steps: {config.sampler.partial.engine_steps}",
            possible="sampler.partial: null",
            remedy="remove sampler.partial, or choose another algorithm",
        )
    if size <= branches.count:
        raise ConfigError(
            f"{what}, {branches.count} in each group, so that of {size} none would begin by itself",
            where=f"sampler.group_size: {size}",
            possible=f"{branches.count + 1} or more",
            remedy=f"raise sampler.group_size, or let {name!r} ask for fewer",
        )


def check_repeatable(config: Config, needs: Needs, facts: EnvironmentFacts | None) -> None:
    """See that the episodes of a run that branches can be played again.

    Raises:
        ConfigError: The environment says that they cannot.
    """
    if needs.branches is None or facts is None or facts.repeatable:
        return
    assert config.environment is not None
    raise ConfigError(
        f"algorithm {config.algorithm.name!r} lets episodes go on from turns of others, which are played again for it, "
        f"and environment {config.environment.name!r} says that an episode cannot be played again",
        where=f"environment.name: {config.environment.name}",
        possible="an environment that is repeatable; some have an option that says so",
        remedy="choose one of these, or another algorithm",
    )
