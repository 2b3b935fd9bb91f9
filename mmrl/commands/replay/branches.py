"""Compares the places from which episodes went on with those that the algorithm names now."""

from __future__ import annotations

from mmrl.commands.replay.comparison import Difference, Part
from mmrl.commands.replay.rerun import name_of
from mmrl.interfaces import Algorithm
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.records import RecordedStep
from mmrl.types import Branch


def branch_part(record: RecordedStep, algorithm: Algorithm) -> Part | None:
    """Ask the algorithm again of each group; None if it does not branch.

    Args:
        algorithm: A new one, as it was before the step.

    Raises:
        PluginError: It fails.
    """
    branching = Branching.of(algorithm, len(record.groups))
    if branching is None:
        return None
    found, compared, each_round = list[Difference](), 0, branching.branches.per_round
    for group in record.groups:
        members = [rollout for rollout in group.rollouts if not rollout.is_given]
        for first in range(len(members) - branching.branches.count, len(members), each_round):
            chosen = branching.chosen(members[:first])
            for rollout, now in zip(members[first:], chosen, strict=False):
                compared += 1
                if rollout.branch != now:
                    found.append(Difference("branch", _told(rollout.branch), _told(now), name_of(rollout)))
    return Part("branches", "episodes", compared, found)


def _told(branch: Branch | None) -> str:
    return "none" if branch is None else f"rollout {branch.member} before its turn {branch.turn}"
