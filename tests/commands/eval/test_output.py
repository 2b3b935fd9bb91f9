"""What an evaluation keeps in its folder, without a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmrl.commands.eval.output import Samples
from mmrl.rollout.rewards.failures import Failure
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import RolloutGroup, ScoredGroup


def scored(question: str) -> ScoredGroup:
    rollouts = make_rollouts(["7", "8"], question=question)
    values = np.array([1.0, 0.0])
    return ScoredGroup(
        RolloutGroup(rollouts[0].prompt, tuple(rollouts)), values, np.ones(2, np.bool_), {"exact": values}
    )


def test_a_group_in_which_a_reward_had_failed_is_asked_for_again(tmp_path: Path) -> None:
    right, failed = scored("a"), scored("b")
    prompts = [group.group.prompt for group in (right, failed)]
    samples = Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path)
    samples.keep(right, [])
    samples.keep(failed, [Failure("exact", failed.group.rollouts[1], "hung")])
    assert list(Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path).known) == ["a"]
