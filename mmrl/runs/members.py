"""Rules for runs whose groups are not only what the next rows are sampled for."""

from __future__ import annotations

from mmrl.config.sections import Config
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm, Needs

_ANOTHER = "or choose another algorithm"


def check_members(config: Config, algorithm: Algorithm, needs: Needs) -> None:
    """See that a run can have what its algorithm asks for: demonstrations beside what is sampled, rollouts of earlier
    steps, and groups in place of rejected ones of the same prompt.

    Raises:
        ConfigError: It cannot.
    """
    name = f"algorithm {config.algorithm.name!r}"
    partial, played = config.sampler.partial, config.environment
    in_parts = None if partial is None else f"sampler.partial.engine_steps: {partial.engine_steps}"
    environment = None if played is None else f"environment.name: {played.name}"
    if needs.demonstration:
        what = f"{name} learns a demonstration beside what is sampled"
        _refuse(environment, f"{what}, and no environment has played it", "environment")
        _refuse_routing(config, what)
    if needs.experience:
        what = f"{name} recalls rollouts of the steps before"
        lag = f"trainer.staleness: {config.trainer.staleness}" if config.trainer.staleness else None
        _refuse(lag, f"{what}, and some of these are not over where the sampler is behind", "trainer.staleness")
        _refuse(in_parts, f"{what}, and in parts some are under way when they would be recalled", "sampler.partial")
        _refuse_routing(config, what)
    if needs.refill is not None and type(algorithm).retry is not Algorithm.retry:
        what = f"{name} has prompts sampled once more with other messages"
        _refuse(environment, f"{what}, and these have what the environment has said at first", "environment")
        _refuse(in_parts, f"{what}, and in parts a prompt has one group", "sampler.partial")


def _refuse(where: str | None, what: str, section: str) -> None:
    """Raise ConfigError where a key is set."""
    if where is not None:
        raise ConfigError(what, where=where, possible=f"without {section}", remedy=f"remove {section}, {_ANOTHER}")


def _refuse_routing(config: Config, what: str) -> None:
    if config.learner.routing != "own":
        where = f"learner.routing: {config.learner.routing}"
        _refuse(where, f"{what}, and of that the sampler's experts are not known", "learner.routing")
