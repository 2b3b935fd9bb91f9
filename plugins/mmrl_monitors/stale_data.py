"""Steps that learn from what an earlier one has learned from, or from completions of weights that no longer change.

- ``prompts``: the same (epoch, prompt) in one step after another, as when the data order is stuck. A dataset that is
  smaller than a step comes again in another epoch, and is no alarm.
- ``weights``: completions are of the same weights as those of the step before, though weights have changed between the
  two steps that these should come from: with ``trainer.staleness`` k those are k steps earlier, and all of the first
  k + 1 steps are sampled with the first weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView


class StaleData(Monitor):
    """The same prompts come in each step, or new weights do not reach the sampler."""

    class Config(PluginConfig):
        repeated: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Share of a step's prompts that the step before has learned from in the same epoch."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``repeated``: that share; ``weights``: the newest version of the weights that sampled."""
        keys = {group.key for group in record.trained}
        versions = [rollout.weight_version for group in record.groups for rollout in group.scored.rollouts]
        found = {"repeated": len(keys & record.previous) / len(keys)} if keys else {}
        return found | ({"weights": float(max(versions))} if versions else {})

    def look(self, step: StepView) -> Sequence[Finding]:
        findings = []
        if (repeated := step.measured("repeated")) is not None:
            what = "a step learns from prompts that the step before has learned from"
            remedy = "compare RUN/ledger.jsonl with the data: the order of the prompts does not go on"
            findings.append(Finding(repeated / self.config.repeated, what, remedy, {"repeated": repeated}, "prompts"))
        versions, norms = step.measured_curve("weights"), step.curve("policy/grad_norm")
        if step.measured("weights") is None or len(versions) < 2:
            return findings
        lag = step.run.staleness
        has_updated = step.step - 1 - lag in norms.steps[-2 - lag :].tolist()
        before, now = versions.tail(2).tolist()
        what = "completions are sampled by weights of an earlier step"
        remedy = "check that new weights reach the sampler (`mmrl doctor`); its own log-probs are then too old as well"
        is_stale = float(has_updated and now == before)
        return [*findings, Finding(is_stale, what, remedy, {"weights": now, "weights_before": before}, "weights")]
