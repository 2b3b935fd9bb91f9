"""Sizes of episodes that a config allows, as a plan assumes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.commands.plan.workload import Grid
from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.config.sections import Config
from mmrl.engine.network.folder import ModelFolder
from mmrl.interfaces import Branches


def longest_episode(config: Config) -> int:
    """Tokens of a completion, or of an episode in which every turn but the last gets the longest observation."""
    if (environment := config.environment) is None:
        return config.sampler.max_new_tokens
    observed = (environment.max_turns - 1) * environment.max_observation_tokens
    return min(config.max_completion_tokens, config.sampler.max_new_tokens + observed)


def observed_grids(config: Config, folder: ModelFolder) -> tuple[Grid, ...]:
    """Patches of an episode's images: one for each observation, as large as may be."""
    if (environment := config.environment) is None or not folder.family.vision:
        return ()
    grid = folder.images.largest_grid(config.data.max_pixels, environment.max_observation_tokens)
    return (grid,) * min(environment.max_images, environment.max_turns - 1)


def limits(
    config: Config, environment: EnvironmentSpec, observed: Sequence[Grid], branches: Branches | None = None
) -> dict[str, int]:
    """The limits of an episode, the images that are assumed in it, and how many of a group go on from others of it."""
    own = config.sampler.max_new_tokens
    turn, most = environment.limits(own)
    return {
        "turns": environment.max_turns,
        "turn_tokens": turn,
        "policy_tokens": own,
        "observation_tokens": environment.max_observation_tokens,
        "tokens": most,
        "images": environment.max_images,
        "images_assumed": len(observed),
        "patches_assumed": sum(t * h * w for t, h, w in observed),
        "branched": 0 if branches is None else branches.count,
    }


def limit_lines(found: Mapping[str, int]) -> list[str]:
    """``limits`` for a person."""
    lines = [
        f"an episode: at most {found['turns']} turns of {found['turn_tokens']} tokens, {found['policy_tokens']} of the "
        f"policy, {found['observation_tokens']} of an observation, {found['tokens']} after the prompt"
    ]
    if found["images_assumed"]:
        lines.append(
            f"in its observations {found['images_assumed']} images (assumed; environment.max_images is "
            f"{found['images']}), {found['patches_assumed']} patches"
        )
    if found["branched"]:
        lines.append(
            f"{found['branched']} episodes of each group go on from others; they are counted whole, though what they "
            "share is sampled once (episode/shared_fraction of a run)"
        )
    return lines
