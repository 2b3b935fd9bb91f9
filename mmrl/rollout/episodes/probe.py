"""An environment's facts, from a process of its own: tools and components are known before anything else starts."""

from __future__ import annotations

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.rollout.episodes.process import EnvironmentFacts, EnvironmentProcess


def environment_facts(spec: EnvironmentSpec) -> EnvironmentFacts:
    """The environment's facts; makes and prepares it in a process that ends at once.

    Raises:
        EpisodeError: It cannot be made or prepared, or a tool cannot be described to the policy.
    """
    process = EnvironmentProcess(spec, wants_tools=True)
    try:
        return process.await_start()
    finally:
        process.stop()
