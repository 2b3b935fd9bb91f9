"""Completions that end up empty: a policy that has given up on some prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView


class EmptyAnswers(Monitor):
    """The plugin that a config names ``new_plugin``."""

    class Config(PluginConfig):
        share: Annotated[float, Field(gt=0, le=1)] = 0.2
        """Share of the completions that is too many; and twice the share at the start."""

    config: Config

    def measure(self, record: StepRecord) -> Mapping[str, float]:
        """Logged as ``monitor/new_plugin/empty``; steps without groups (demonstrations) are left out."""
        texts = [rollout.text for group in record.groups for rollout in group.scored.rollouts]
        return {"empty": sum(not text.strip() for text in texts) / len(texts)} if texts else {}

    def look(self, step: StepView) -> Sequence[Finding]:
        empty, baseline = step.measured("empty"), step.measured_curve("empty").baseline()
        if empty is None or baseline is None:  # there is no baseline in the first twenty steps
            return []
        severity = empty / max(self.config.share, 2 * baseline.median)
        values = {"empty": empty, "baseline": baseline.median}
        return [Finding(severity, "completions are empty", "read the prompts that get none", values)]
