"""Monitors of the fake engine's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView


class Loud(Monitor):
    """A hit at each step from ``first`` on, with numbers of the step's groups and of the steps before."""

    class Config(PluginConfig):
        first: int = 2
        """The first step that is a hit."""
        hits: int = 2
        """Hits that make an alarm."""

    config: Config

    def measure(self, record: StepRecord) -> Mapping[str, float]:
        rollouts = [rollout for group in record.trained for rollout in group.scored.rollouts]
        found = {"letters": sum(len(rollout.text) for rollout in rollouts) / len(rollouts)} if rollouts else {}
        return found | ({"evaluated": len(record.evaluation)} if record.evaluation else {})

    def look(self, step: StepView) -> Sequence[Finding]:
        if step.step == 0:
            return []
        letters, evaluated = step.measured_curve("letters"), step.measured_curve("evaluated")
        values = {"letters": float(letters.values.mean()), "evaluated": float(evaluated.values.sum())}
        values |= {"reward": float(step.curve("reward/mean").values.sum())}
        severity = 1.0 if step.step >= self.config.first else 0.0
        return [Finding(severity, "it is loud", "be quiet", values, hits=self.config.hits)]


class Broken(Monitor):
    """Raises at step 2."""

    def look(self, step: StepView) -> Sequence[Finding]:
        if step.step >= 2:
            raise RuntimeError("no more")
        return []
