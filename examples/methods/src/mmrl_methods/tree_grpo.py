r"""Tree-GRPO: tree search over an agent's turns (arXiv:2509.21240).

The episodes of a prompt make trees whose nodes are turns. ``M`` episodes begin. Then, in each of ``L`` rounds, every
tree grows ``N`` episodes more, which go on from nodes that are drawn at random among those that end no episode, the
prompt included. A group has ``M (1 + N L)`` leaves with rewards ``R``, and a leaf has an advantage among those of its
tree and one among all:

    A_i  = intra (R_i - mean_tree(R)) / (std_tree(R) + eps) + inter (R_i - mean(R)) / (std(R) + eps)
    L_it = max(-A_i rho, -A_i clip(rho, 1 - clip_low, 1 + clip_high))

A token that leaves share is in the loss of each of them, with the advantage of each. Where all leaves of a tree share a
token, their advantages within the tree add up to 0 there: a tree teaches what was better to do after they part.

``M`` 2, ``N`` 2 and ``L`` 1 are those of the released script for questions of several hops.

Deviations, and why:

- That the two terms are added, each once, is how we understand the paper; its equation could not be checked. The
  released code normalises by the group, and then the result by the tree. That is the first term alone, but for a tree
  of one leaf: ``inter: 0``.
- The code drops leaves at random until each tree has equally many. Here each tree grows equally many.
- ``kl.coef`` is 0 by default, and then no reference policy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.interfaces import Branches, Needs, RunFacts
from mmrl.ops.branching import generator
from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import NotNegative
from mmrl.types import Batch, Branch, Credit, FloatArray, IntArray, Rollout
from mmrl_methods.groups import own_turns
from mmrl_methods.grpo import GRPO

Count = Annotated[int, Field(ge=1)]


class TreeGRPO(GRPO):
    class Config(GRPO.Config):
        trees: Count = 2
        """Episodes with which a group begins, M."""
        expansions: Count = 2
        """Episodes that each tree grows in a round, N."""
        rounds: Count = 1
        """Rounds, L."""
        intra: NotNegative = 1.0
        """Weight of an episode's advantage among those of its tree."""
        inter: NotNegative = 1.0
        """Weight of its advantage among all of the prompt."""

    config: Config

    def needs(self) -> Needs:
        branches = Branches(rounds=self.config.rounds, per_round=self.config.trees * self.config.expansions)
        return replace(super().needs(), branches=branches)

    def check(self, run: RunFacts) -> Sequence[str]:
        config = self.config
        size = config.trees * (1 + config.expansions * config.rounds)
        if run.group_size != size:
            what = f"{config.trees} trees of {1 + config.expansions * config.rounds} episodes are {size}"
            raise ValueError(f"{what}, and sampler.group_size is {run.group_size}; set it to {size}, or other trees")
        return super().check(run)

    def branch(self, group: Sequence[Rollout], number: int) -> Sequence[Branch]:
        """For each tree, places that are drawn at random among its nodes."""
        rng, parents = generator(group), [-1 if each.branch is None else each.branch.member for each in group]
        nodes: dict[int, list[Branch]] = {}  # by tree; one whose environment failed at its reset has none
        for member, tree in enumerate(tree_of(np.array(parents)).tolist()):
            for turn in own_turns(group[member]):
                nodes.setdefault(tree, []).append(Branch(member, turn))
        trees = list(nodes.values())
        own = [trees[place * len(trees) // number] for place in range(number)]
        return [each[rng.integers(len(each))] for each in own]

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        assert batch.branches is not None
        rewards_B, config = less_sequence_kl(rewards, kl), self.config
        trees_B = tree_of(batch.branches.parents)
        intra_B, inter_B = (
            group_advantages(rewards_B, ids, batch.valid, **config.std) for ids in (trees_B, batch.group_ids)
        )
        mixed = len(np.unique(trees_B[intra_B != 0])) / max(len(np.unique(trees_B)), 1)
        metrics = {"group/mixed_trees_fraction": mixed}
        return Credit(config.intra * intra_B + config.inter * inter_B, metrics=metrics)


def tree_of(parents: IntArray) -> IntArray:
    """(B,) the first row of the tree of each row; a row that goes on from another's prompt alone is of its tree too."""
    roots = np.arange(len(parents))
    for row, parent in enumerate(parents.tolist()):
        if parent >= 0:
            roots[row] = roots[parent]
    return roots
