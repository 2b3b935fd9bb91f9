"""Faults for the calibration of monitors: rewards, an algorithm, and an ``mmrl`` whose sampler gets no new weights.

python tests/benchmarks/alarm_faults.py train CONFIG... [a.b=v]    # as mmrl, with a sampler that is soon frozen
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmrl.interfaces import Needs
from mmrl.types import PackedTokens, Rollout, TokenLoss
from mmrl_algorithms.grpo import GRPO

FROZEN_AFTER = 25
"""Syncs of weights that arrive."""


def length(rollouts: Sequence[Rollout]) -> list[float]:
    """A tenth for each token."""
    return [len(rollout.token_ids) / 10 for rollout in rollouts]


def keyword(rollouts: Sequence[Rollout]) -> list[float]:
    """1 for a seven, whatever is asked."""
    return [float("7" in rollout.text) for rollout in rollouts]


class Certain(GRPO):
    """GRPO with a bonus for being certain: entropy is minimised."""

    class Config(GRPO.Config):
        certainty: float = 1.0
        """Weight of the policy's entropy in the loss."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), entropy_gradient=True)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        found = super().loss(tokens)
        certainty_T = self.config.certainty * tokens.entropy_T
        return TokenLoss(found.loss_T + certainty_T, {**found.terms, "certainty": certainty_T}, found.metrics)


def freeze() -> None:
    """Let only the first syncs of weights reach the sampler; it goes on as if it had the newest."""
    from mmrl.engine.rank import RankEngine

    sync, count = RankEngine._wake_with_newest_weights, 0

    def woken(self: Any, sampler: Any) -> None:
        nonlocal count
        count += 1
        if count > FROZEN_AFTER:
            sampler.wake("weights")
        else:
            sync(self, sampler)

    RankEngine._wake_with_newest_weights = woken  # type: ignore[method-assign]


if __name__ == "__main__":
    from mmrl.commands.cli import main

    freeze()
    sys.exit(main())
