r"""ARPO: agentic reinforced policy optimization, which branches where a tool's answer makes the policy unsure
(arXiv:2507.19849, section 3).

(Another paper, 2505.16282, has the same name: ``arpo_replay``.) A part of a group's episodes begin at the prompt; the
others go on from these, at turns that follow an observation and whose first tokens have more entropy than the
episode's first turn:

    H_k  = the mean entropy of the first ``tokens`` tokens of turn k, / ``nats``
    P_k  = branch_probability + entropy_weight (H_k - H_0)        that an episode branches before turn k
    A_i  = (R_i - mean(R)) / (std(R) + eps)                       over all episodes of the prompt
    A_it = A_i (attribution: soft), or the mean of A over the episodes that share token t (hard)
    L_it = max(-A_it rho, -A_it clip(rho, 1 - clip_low, 1 + clip_high))

What is left of the number when all turns have been tried begins anew at the prompt. The probabilities (0.5, 0.2), the
20 tokens and half a group of branches are those of the released code. ``soft`` is its default: shared tokens meet the
same ratio in each episode, and so learn from the mean of their advantages without being given it.

Deviations from the paper, and why:

- The entropy is estimated by ``-log mu(y)`` of the tokens that were sampled, whose mean it is; the code sums over the
  ten likeliest tokens. ``nats`` stands for the logarithm of the vocabulary, by which the code divides.
- An episode branches before the turn that was unsure, and another answer to the same observation is sampled. The code
  measures a turn and branches after its tool call.
- Episodes branch when the first ones are over, and not while they are sampled: as many tokens, in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.interfaces import Branches, Needs, RunFacts
from mmrl.ops.branching import generator, means_over_sharers
from mmrl.policy_gradient import NotNegative, Positive
from mmrl.types import Batch, Branch, Credit, FloatArray, Rollout, policy_turns
from mmrl_methods.groups import own_turns
from mmrl_methods.grpo import GRPO

Count = Annotated[int, Field(ge=1)]


class EntropyARPO(GRPO):
    class Config(GRPO.Config):
        rounds: Count = 1
        """Times that further episodes begin."""
        per_round: Count = 8
        """Episodes of a group that begin in each of them."""
        branch_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
        """Probability of a branch before a turn that is as sure as the first one."""
        entropy_weight: NotNegative = 0.2
        """What an entropy of `nats` above that of the first turn adds to it."""
        tokens: Count = 20
        """First tokens of a turn whose entropy counts."""
        nats: Positive = 12.0
        """Entropy that counts as 1: the logarithm of the number of tokens."""
        attribution: Literal["soft", "hard"] = "soft"
        """hard gives shared tokens the mean of the advantages of the episodes that share them."""

    config: Config

    def needs(self) -> Needs:
        branches = Branches(rounds=self.config.rounds, per_round=self.config.per_round)
        return replace(super().needs(), branches=branches)

    def check(self, run: RunFacts) -> Sequence[str]:
        count = self.config.rounds * self.config.per_round
        if count >= run.group_size:
            what = f"{count} episodes of a group branch, and sampler.group_size is {run.group_size}"
            raise ValueError(f"{what}; raise it (the paper has twice as many), or lower per_round")
        return super().check(run)

    def branch(self, group: Sequence[Rollout], number: int) -> Sequence[Branch]:
        """Turns after an observation, each with its probability, and the prompt for what is left."""
        rng, config = generator(group), self.config
        found = list[Branch]()
        places = [(member, turn) for member, each in enumerate(group) for turn in own_turns(each) if turn]
        for place in rng.permutation(len(places)):
            member, turn = places[place]
            surprisals = turn_surprisals(group[member], config.tokens)
            change = (surprisals[turn] - surprisals[0]) / config.nats
            if rng.random() <= config.branch_probability + config.entropy_weight * change:
                found.append(Branch(member, turn))
        found = found[:number]
        return found + [Branch(0, 0)] * (number - len(found))

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        credit = super().advantages(batch, rewards, kl)
        assert batch.branches is not None
        if self.config.attribution == "soft":
            return credit
        lengths = [len(mask) for mask in batch.masks]
        values_B = np.asarray(credit.advantages, np.float64)
        return replace(credit, advantages=means_over_sharers(batch.branches, values_B, lengths, batch.valid))


def turn_surprisals(rollout: Rollout, tokens: int) -> list[float]:
    """The mean of ``-log mu(y)`` over the first tokens of each turn, which estimates their entropy; 0 without any."""
    turns = policy_turns(rollout.segments)
    logprobs = [np.concatenate([segment.sampler_logprobs for segment in turn])[:tokens] for turn in turns]
    return [-float(each.mean()) if len(each) else 0.0 for each in logprobs]
