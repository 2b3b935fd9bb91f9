r"""RLEP: reinforcement learning with experience replay (arXiv:2507.07451, section 2).

``M`` successes of earlier steps are in each group, whatever its own completions are worth:

    group   = G - M new completions and M kept successes of the prompt, as many as there are
    A_i     = (R_i - mean(R)) / (std(R) + eps)        over the group
    L_it    = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high)),  a mean over all tokens

with clips of 0.2 and 0.28, and ``M`` 2 beside 16 new completions, as in the released config.

Deviations from the paper, and why:

- There a run before this one collects the successes; here the run itself keeps those of its earlier epochs.
- There a group grows by ``M``; here successes take the places of its last members, so that steps have one size. With
  ``sampler.group_size: 18`` sixteen are new.
- A success that is drawn for two members of a group is used once; the newest ones are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.interfaces import AggregationMode, RunFacts
from mmrl.policy_gradient import Positive
from mmrl.types import Experience, ScoredGroup
from mmrl_methods.arpo_replay import Count, Replaying


class RLEP(Replaying):
    class Config(Replaying.Config):
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""
        clip_high: Positive = 0.28
        """The ratio is clipped above `1 + clip_high`."""
        replayed: Count = 2
        """Kept successes in each group, M."""

    config: Config

    def check(self, run: RunFacts) -> Sequence[str]:
        if self.config.replayed >= run.group_size:
            what = f"replayed is {self.config.replayed} of a group of {run.group_size}"
            raise ValueError(f"{what}, and none would be new; raise sampler.group_size")
        if self.config.replayed > self.config.buffer:
            raise ValueError(f"replayed is {self.config.replayed}, and buffer keeps {self.config.buffer}")
        return super().check(run)

    def recall(self, group: ScoredGroup, kept: Sequence[Experience]) -> Mapping[int, int]:
        """The newest successes for the last members."""
        members = len(group.rollouts)
        count = min(self.config.replayed, len(kept), members)
        return {members - 1 - place: len(kept) - 1 - place for place in range(count)}
