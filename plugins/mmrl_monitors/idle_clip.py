"""A clip that never acts though the policy moves far within a step: its bounds are too wide, or it is not in use.

Concerns runs with several optimizer steps on a batch. With one, the ratio is 1 and nothing can be clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView


class IdleClip(Monitor):
    """No token is clipped, while the policy moves a hundred times as far as at the start."""

    class Config(PluginConfig):
        growth: Annotated[float, Field(gt=1)] = 100.0
        """Divergence within a step, in those of the run's start."""
        least: Annotated[float, Field(gt=0)] = 0.01
        """Divergence in nats below which it does not matter."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        high, low = step.get("policy/clip_fraction_high"), step.get("policy/clip_fraction_low")
        if step.run.updates_per_batch == 1 or high is None or low is None:
            return ()
        measures = {"policy/ppo_kl_k3": "divergence_in_a_step", "mismatch/kl": "divergence_from_the_sampler"}
        worst, values = 0.0, dict[str, float]()
        for metric, name in measures.items():
            now, baseline = step.get(metric), step.curve(metric).baseline()
            if now is None or baseline is None:
                continue
            values |= {name: now, f"baseline_{name}": baseline.median}
            worst = max(worst, now / max(self.config.growth * baseline.median, self.config.least))
        if not values:
            return ()
        return (
            Finding(
                worst if high + low == 0 else 0.0,
                "no token is clipped, though the policy moves far within a step",
                "narrow the algorithm's clip, lower learner.lr, or take fewer optimizer steps on a batch "
                "(learner.minibatches, learner.epochs)",
                values,
            ),
        )
