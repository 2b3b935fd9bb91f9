"""Completions that are no language any more, in the two forms that prime-rl filters (prime-rl#2245).

- ``repeats``: completions with a long run of tokens that the sampler was nearly certain of, as in a loop.
- ``rare_tokens``: completions with a token of the vocabulary's rare end to which the sampler gave next to nothing, less
  than a draw from all tokens would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl.types import BoolArray, Rollout

CERTAIN = float(np.log(0.99))


class Gibberish(Monitor):
    """Completions run in loops, or hold tokens that nobody would write."""

    class Config(PluginConfig):
        run_tokens: Annotated[int, Field(ge=1)] = 400
        """Certain tokens in a row that are a loop."""
        rare_id: Annotated[int, Field(ge=0)] = 100_000
        """Token id from which on tokens are rare."""
        rare_logprob: Annotated[float, Field(lt=0)] = -14.0
        """Log-prob below which a rare token is odd: 2 nats below a draw from 160,000 tokens."""
        share: Annotated[float, Field(gt=0, lt=1)] = 0.05
        """Share of the completions."""
        growth: Annotated[float, Field(ge=1)] = 3.0
        """The share in shares of the run's start, if there it was above 0."""

    config: Config

    def measure(self, record: StepRecord) -> dict[str, float]:
        """``repeats`` and ``rare_tokens``: shares of the completions."""
        rollouts = [rollout for group in record.groups for rollout in group.scored.rollouts if len(rollout.token_ids)]
        if not rollouts:
            return {}
        return {
            "repeats": float(np.mean([self._repeats(rollout) for rollout in rollouts])),
            "rare_tokens": float(np.mean([self._has_rare_tokens(rollout) for rollout in rollouts])),
        }

    def look(self, step: StepView) -> Sequence[Finding]:
        texts = {
            "repeats": ("completions run in loops", "penalise length or repetition, lower learner.lr"),
            "rare_tokens": ("completions hold tokens that nobody would write", "lower learner.lr or add a KL penalty"),
        }
        findings = []
        for cause, (what, remedy) in texts.items():
            share, baseline = step.measured(cause), step.measured_curve(cause).baseline()
            if share is not None and baseline is not None:
                bound = max(self.config.share, self.config.growth * baseline.median)
                values = {"completions": share, "baseline": baseline.median}
                remedy = f"{remedy}, or go back to an earlier checkpoint"
                findings.append(Finding(share / bound, what, remedy, values, cause))
        return findings

    def _repeats(self, rollout: Rollout) -> bool:
        if len(rollout.token_ids) < self.config.run_tokens:
            return False
        return longest_run(rollout.mask & (rollout.sampler_logprobs > CERTAIN)) >= self.config.run_tokens

    def _has_rare_tokens(self, rollout: Rollout) -> bool:
        rare = rollout.mask & (rollout.token_ids >= self.config.rare_id)
        return bool((rollout.sampler_logprobs[rare] < self.config.rare_logprob).any())


def longest_run(flags: BoolArray) -> int:
    """The most flags in a row that are set."""
    ends = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return int((ends[1::2] - ends[::2]).max(initial=0))
