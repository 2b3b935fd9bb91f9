"""Length that pays (a long way to go: length correlations in RLHF, arXiv:2310.03716).

- ``reward``: within groups, longer completions earn more, and completions have grown.
- ``truncated``: more completions than at the start are cut off at a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl_monitors.within import correlation, lengths, mean

START = 5
"""Steps at the start whose length later ones are compared with: a reward that pays length is soon followed."""


class LengthHacking(Monitor):
    """Longer completions earn more, and completions grow; or more and more are cut off."""

    class Config(PluginConfig):
        correlation: Annotated[float, Field(gt=0, lt=1)] = 0.5
        """Mean correlation of reward and length within groups."""
        growth: Annotated[float, Field(gt=1)] = 1.5
        """Length of a completion, in lengths at the start."""
        truncated: Annotated[float, Field(gt=0, lt=1)] = 0.1
        """Share of completions that are cut off; and at least `growth` times the share at the start."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``correlation``: of reward and length, mean over the groups in which both differ."""
        scored = [group.scored for group in record.groups]
        found = mean(correlation(group.rewards[group.valid], lengths(group.rollouts)[group.valid]) for group in scored)
        return {"correlation": found["mean"]} if found else {}

    def look(self, step: StepView) -> Sequence[Finding]:
        return [finding for finding in (self._reward(step), self._truncated(step)) if finding is not None]

    def _reward(self, step: StepView) -> Finding | None:
        found, length = step.measured("correlation"), step.get("length/completion_mean")
        start = step.curve("length/completion_mean").baseline(START)
        if found is None or length is None or start is None:
            return None
        grown = length / max(start.median, 1.0)
        return Finding(
            max(min(found / self.config.correlation, grown / self.config.growth), 0.0),
            "longer completions earn more, and completions grow",
            "read the longest completions; if their length is not what makes them right, correct the reward, add a "
            "penalty of length, or use an algorithm that does not divide by length",
            {"correlation": found, "length": length, "length_at_the_start": start.median},
            "reward",
        )

    def _truncated(self, step: StepView) -> Finding | None:
        share = step.get("length/truncated_fraction")
        start = step.curve("length/truncated_fraction").baseline(START)
        if share is None or start is None or step.get("reward/mean") is None:
            return None
        return Finding(
            min(share / self.config.truncated, share / max(self.config.growth * start.median, 1e-6)),
            "completions are cut off at the limit of their length",
            "raise sampler.max_new_tokens if they were on the way to an answer; else leave them out of the loss, or "
            "add a penalty of length",
            {"truncated": share, "truncated_at_the_start": start.median},
            "truncated",
        )
