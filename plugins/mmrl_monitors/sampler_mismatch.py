"""Sampler and learner that drift apart: the 99th percentile of the gap between their log-probs of a token.

The mean of the gap, which a run logs, hides the few tokens that an engine's bug or stale weights concern. Tokens of
weights that the learner has left behind have another log-prob in sound engines, so those of a step's newest weights are
compared, and nothing is where these are behind as well (``trainer.staleness``): a probe of each version compares there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView


class SamplerMismatch(Monitor):
    """The gap of the worst tokens is ten times that of the run's start."""

    class Config(PluginConfig):
        growth: Annotated[float, Field(gt=1)] = 10.0
        """The 99th percentile of the gap, in those of the run's start."""
        least: Annotated[float, Field(gt=0)] = 0.02
        """Gap in nats below which it does not matter."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``gap_p99``: in nats, over the tokens that the policy wrote with the newest weights and the step has learned
        from."""
        if record.run.staleness:
            return {}
        newest = max((each.weight_version for group in record.trained for each in group.scored.rollouts), default=0)
        gaps = [
            np.abs(logprobs - rollout.sampler_logprobs)[rollout.mask & (rollout.version_of_token == newest)]
            for group in record.trained
            for rollout, logprobs in zip(group.scored.rollouts, group.logprobs, strict=True)
            if len(logprobs) and not rollout.view  # else they are about two prompts
        ]
        known = np.concatenate(gaps) if gaps else np.zeros(0)
        known = known[np.isfinite(known)]
        return {"gap_p99": float(np.quantile(known, 0.99))} if len(known) else {}

    def look(self, step: StepView) -> Sequence[Finding]:
        gap, baseline = step.measured("gap_p99"), step.measured_curve("gap_p99").baseline()
        if gap is None or baseline is None:
            return ()
        return (
            Finding(
                gap / max(self.config.growth * baseline.median, self.config.least),
                "sampler and learner disagree far more than at the start",
                "check that new weights reach the sampler (`mmrl doctor`), its engine arguments and its dtype; a "
                "correction of the algorithm bounds what such tokens do",
                {"gap_p99": gap, "baseline_gap_p99": baseline.median},
            ),
        )
