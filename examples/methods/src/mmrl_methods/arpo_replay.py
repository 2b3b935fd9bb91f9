r"""ARPO for GUI agents: agentic replay policy optimization (arXiv:2505.16282, section 3).

(Another paper, 2507.19849, has the same name: ``arpo_entropy``.) GRPO, with the successes of a task kept from step to
step. Where a group has no success, a kept one takes the place of a member, so that the group has an advantage:

    kept      the newest ``buffer`` episodes of each task whose reward is above ``success``
    replayed  one of them in place of the first member, if std(R) < 0.05 and mean(R) < 0.2 (the group failed)
    A_i     = (R_i - mean(R)) / (std(R) + eps)        with the replayed episode among them
    L_it    = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)),  clips of 0.2 and 0.3, no KL

Thresholds, buffer (8) and clips are those of the released code.

Deviations from the paper, and why:

- The code draws the kept episode at random; here each in turn, by what the group wrote, so that a run repeats.
- Its tasks are filtered beforehand by how often a baseline solves them. That is a choice of data, and no part of this.
- The ratio of a replayed token is to the policy before the step, as in the code: what the weights have learned since it
  was sampled is not corrected for.
- The mean over tokens is of each episode and then over episodes, as in GRPO.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Needs
from mmrl.policy_gradient import NotNegative, Positive
from mmrl.types import Batch, Credit, Experience, FloatArray, ScoredGroup
from mmrl_methods.grpo import GRPO

Count = Annotated[int, Field(ge=1)]


class Replaying(GRPO):
    """Base of algorithms that keep each prompt's successes and give them places in its later groups."""

    class Config(GRPO.Config):
        buffer: Count = 8
        """Successes that are kept of each prompt, the newest ones."""
        success: float = 0.1
        """A completion succeeds if its reward is above this."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), experience=self.config.buffer)

    def remember(self, group: ScoredGroup) -> Sequence[int]:
        """The members that succeeded."""
        return [int(place) for place in np.flatnonzero(group.valid & (group.rewards > self.config.success))]

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        credit = super().advantages(batch, rewards, kl)
        assert batch.recalled is not None
        share = float(batch.recalled[batch.valid].mean()) if batch.valid.any() else 0.0
        return replace(credit, metrics={**credit.metrics, "experience/recalled_fraction": share})


def turn_of(group: ScoredGroup, count: int) -> int:
    """A number below ``count`` that follows from the tokens of a group."""
    written = b"".join(rollout.token_ids.tobytes() for rollout in group.rollouts)
    return zlib.crc32(written) % count


class ReplayARPO(Replaying):
    class Config(Replaying.Config):
        clip_high: Positive = 0.3
        """The ratio is clipped above `1 + clip_high`."""
        failed_mean: float = 0.2
        """A group failed if the mean of its rewards is below this, and their deviation below `failed_std`."""
        failed_std: NotNegative = 0.05
        """See `failed_mean`."""

    config: Config

    def recall(self, group: ScoredGroup, kept: Sequence[Experience]) -> Mapping[int, int]:
        """One kept success for the first member of a group that failed."""
        rewards = group.rewards[group.valid]
        failed = len(rewards) and rewards.std() < self.config.failed_std and rewards.mean() < self.config.failed_mean
        return {0: turn_of(group, len(kept))} if failed else {}
