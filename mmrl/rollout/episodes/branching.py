"""Which episodes of a group go on from others of it, as an algorithm says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.errors import plugin_errors
from mmrl.interfaces import Algorithm, Branches
from mmrl.types import Branch, Rollout


@dataclass(frozen=True, slots=True)
class Branching:
    """An algorithm's branches.

    Attributes:
        num_groups: The first so many groups of a round of sampling branch; the others have greedy rollouts.
    """

    algorithm: Algorithm
    branches: Branches
    num_groups: int

    @classmethod
    def of(cls, algorithm: Algorithm, num_groups: int) -> Branching | None:
        """The algorithm's; None if it does not branch."""
        branches = algorithm.needs().branches
        return None if branches is None else cls(algorithm, branches, num_groups)

    def count(self, index: int) -> int:
        """Episodes of a group that go on from others."""
        return self.branches.count if index < self.num_groups else 0

    def chosen(self, group: Sequence[Rollout]) -> Sequence[Branch]:
        """The places from which a group's next episodes go on.

        Where no episode has had a turn, the algorithm is not asked.

        Raises:
            PluginError: The algorithm raised, or answered anything but so many places in the group.
        """
        number = self.branches.per_round
        if not any(rollout.episode for rollout in group):
            return [Branch(0, 0)] * number
        with plugin_errors(self.algorithm, "branch"):
            answer = list(self.algorithm.branch(group, number))
            if len(answer) != number or not all(isinstance(each, Branch) for each in answer):
                raise ValueError(f"{number} episodes need one Branch each, not {answer!r:.200}")
            for branch in answer:
                _check(branch, group)
        return [Branch(int(each.member), int(each.turn)) for each in answer]


def _check(branch: Branch, group: Sequence[Rollout]) -> None:
    if not 0 <= branch.member < len(group):
        raise ValueError(f"there are members 0 to {len(group) - 1} so far, and not {branch.member}")
    turns = len(group[branch.member].episode)
    if branch.turn and not 0 <= branch.turn < turns:
        there = f"turns 0 to {turns - 1}" if turns else "no turns, as its environment failed at its reset"
        raise ValueError(f"member {branch.member} has {there}, and none is {branch.turn}")
