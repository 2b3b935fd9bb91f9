"""The share of completions that are empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView


class OldEmpty(Monitor):
    class Config(PluginConfig):
        pass

    def measure(self, record: StepRecord) -> Mapping[str, float]:
        texts = [rollout.text for group in record.groups for rollout in group.scored.rollouts]
        return {"empty": sum(not text for text in texts) / len(texts)} if texts else {}

    def look(self, step: StepView) -> Sequence[Finding]:
        empty = step.measured("empty")
        return [] if empty is None else [Finding(empty, "completions are empty", "read them", {"empty": empty})]
