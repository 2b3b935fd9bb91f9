"""The facts of a run's environment, checked against its config."""

from __future__ import annotations

from mmrl.config.sections import Config, is_component
from mmrl.errors import ConfigError
from mmrl.rollout.episodes.probe import environment_facts
from mmrl.rollout.episodes.process import EnvironmentFacts
from mmrl.types import ENVIRONMENT


def checked_facts(config: Config) -> EnvironmentFacts | None:
    """The facts of the config's environment, from a process of its own; None without one.

    Raises:
        ConfigError: Names of components do not go together, or ``environment.weights`` or ``trainer.eval_metric`` names
            none of them.
        EpisodeError: The environment cannot be made or prepared.
    """
    if config.environment is None:
        return None
    facts = environment_facts(config.environment)
    own, rewards = (ENVIRONMENT, *facts.components), [spec.metric for spec in config.rewards]
    if taken := [name for name in own if is_component(name, rewards)]:
        raise ConfigError(
            f"a reward and the environment both answer a component {taken[0]!r}",
            where="rewards[].label, environment",
            possible=f"labels other than {', '.join(own)}",
            remedy="give the reward another label",
        )
    if len(set(own)) < len(own):
        raise ConfigError(
            f"the environment scores a component twice, or one called {ENVIRONMENT!r}, which is the sum of its rewards",
            where=f"environment: {config.environment.name}",
            possible=", ".join(own),
            remedy="rename it in the environment's components",
        )
    if unknown := sorted(config.environment.weights.keys() - set(own)):
        raise ConfigError(
            f"the environment scores no {', '.join(unknown)}",
            where="environment.weights",
            possible=", ".join(own),
            remedy="weigh one of these",
        )
    metric = config.trainer.eval_metric
    if metric is not None and metric not in own and not is_component(metric, rewards):
        raise ConfigError(
            f"trainer.eval_metric is {metric!r}, which neither a reward nor the environment answers",
            where="trainer.eval_metric",
            possible=", ".join([*rewards, *own]),
            remedy="name one of these",
        )
    return facts
