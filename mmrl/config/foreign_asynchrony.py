"""Keys of other trainers that ask for asynchronous time: translated where they mean the same, else refused.

A config that is translated without them would run in another way than it says.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from mmrl.config.synonyms import synonym
from mmrl.errors import ConfigError

STALENESS = "trainer.staleness"
_STEPS = (
    *("max_staleness", "max_staleness_steps", "max_async_level", "async_level", "max_head_offpolicyness"),
    *("max_trajectory_age_steps", "sampling_steps_ahead", "async_generation_ratio"),
)
"""Words whose numbers are optimizer steps."""
_EVERY = ("trigger_parameter_sync_step", "weight_sync_steps", "update_weights_interval")
"""Words whose number is 1 where weights are sent after each step, as they are here."""
_TOGETHER = ("hybrid_engine", "colocate", "colocate_all", "colocate_all_models")
"""Words that are true where the same GPUs sample and learn."""
_TIMES = (STALENESS, "sampler.partial", "sampler.partial.in_flight")
_OFF = (None, False, 0, "", "colocate", "none", "sync")


def staleness_of(config: MutableMapping[str, Any]) -> dict[str, int]:
    """The flat keys of a config that are mmrl's staleness in steps; those that ask for no such time are removed.

    Raises:
        ConfigError: Others ask for it; all of them are named.
    """
    steps, refused = dict[str, int](), dict[str, str]()
    for key, value in [*config.items()]:
        word = key.lower().replace("-", "_").rpartition(".")[2]
        parent = key.lower().rpartition(".")[0]
        found = synonym(key)
        ours = STALENESS if word == "enabled" and "async" in parent else "" if found is None else found.key
        if word in _TOGETHER or key.endswith("generation.colocated.enabled"):
            if value is False:
                refused[key] = "cluster.sampler_ranks and cluster.learner_ranks"
            continue
        if ours not in _TIMES or any(part in ("critic", "ref") for part in parent.split(".")):
            continue
        if value in _OFF or (word in _EVERY and value == 1):
            del config[key]
        elif word in _STEPS and type(value) in (int, float) and value in (1, 2, 3, 4):
            steps[key] = int(value)
        else:
            refused[key] = ours
    if len(set(steps.values())) > 1:
        refused |= dict.fromkeys(steps, STALENESS)
    if refused:
        told = "; ".join(f"{key}: {config[key]} ({ours})" for key, ours in refused.items())
        raise ConfigError(
            f"the config asks for asynchronous time that has no equal here: {told}",
            possible="trainer.staleness: 0 to 4, a fixed lag in steps; sampler.partial: {engine_steps: N}",
            remedy="remove these keys from what is translated, and set mmrl's in the config that is written",
        )
    return steps
