"""A policy that has stopped to explore (The entropy mechanism of RL for reasoning, arXiv:2505.22617).

Entropy falls in every run that learns: by 73 % in 200 steps is nothing unusual. What is unusual is ``early``, under a
fifth of the start in the first half of a run, and ``none``, close to 0. A run in which nearly every prompt is right all
the time may be sure of its answers: there it is no alarm. Nor is it one for demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepView

START = 5
SOLVED = 0.9
"""Share of the prompts that are always right above which a policy may be sure."""
_REMEDY = (
    "raise clip_high or the entropy bonus of the algorithm, lower learner.lr, or add a KL penalty; completions of a "
    "prompt that are all alike teach nothing"
)


class LowEntropy(Monitor):
    """Entropy collapse: entropy falls too early, or to nothing."""

    class Config(PluginConfig):
        share: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """Share of the entropy at the start."""
        before: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Share of the steps before which such a fall is early."""
        least: Annotated[float, Field(gt=0)] = 0.02
        """Entropy in nats below which nothing is left, and less than half of that at the start."""

    config: Config

    def look(self, step: StepView) -> Sequence[Finding]:
        entropy, start = step.get("policy/entropy"), step.curve("policy/entropy").baseline(START)
        if entropy is None or start is None or step.get("reward/mean") is None:
            return ()
        is_sure = step.metrics.get("group/all_correct_fraction", 0.0) > SOLVED
        values = {"entropy": entropy, "entropy_at_the_start": start.median}
        floor = max(entropy, 1e-9)
        early = self.config.share * start.median / floor
        none = min(self.config.least, start.median / 2) / floor
        findings = [Finding(0.0 if is_sure else none, "the policy's entropy is close to 0", _REMEDY, values, "none")]
        if step.step < self.config.before * step.num_steps:
            what = "entropy has fallen early"
            findings.append(Finding(0.0 if is_sure else early, what, _REMEDY, values, "early"))
        return findings
