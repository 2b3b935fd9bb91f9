r"""GiGPO: group-in-group policy optimization (arXiv:2505.10978, equations 3 to 8), for episodes of several turns.

For each prompt, ``G`` episodes ``i`` of turns ``t``, with rewards ``r_it`` and total rewards ``R_i``:

    A_i    = (R_i - mean(R)) / F(R)                    over the prompt's episodes
    R_it   = sum_{k >= t} gamma^(k - t) r_ik
    A_it   = (R_it - mean(R')) / F(R')                 over R', the returns of the turns that acted upon the same state
    A      = A_i + step_weight A_it                    for each token of turn t
    F      = std + eps, or 1                           (normalise)

and then the loss of ``grpo``. Turns of all the prompt's episodes that acted upon the same state form a group, also
several of one episode: no turn is sampled again for it. A state is what the policy last read (``Batch.turn_states``);
that of the first turn is the prompt.

Deviations from the paper, and why:

- The rewards of turns are the environment's, weighed as in the total. What else the total holds is known at the end
  alone, and is a reward of the last turn, so that a turn's undiscounted return is the rest of the total
  (``outcome: false`` leaves it to ``A_i``). ``reward_norm``, ``reward_clip`` and the KL shape ``R_i`` alone.
- A state that one turn acted upon, and one whose turns have equal returns, has ``A_it`` exactly 0 (the paper's 0/0).
- ``std`` is the sample's, and ratios are those of tokens, as in ``grpo``; ``aggregation`` is a mean over episodes.
- ``kl.coef`` is 0 by default, and no penalty for invalid actions is built in: an environment may give one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.interfaces import Needs, RunFacts
from mmrl.ops.credit import group_advantages, less_sequence_kl
from mmrl.policy_gradient import NotNegative
from mmrl.types import ENVIRONMENT, Batch, BoolArray, Credit, FloatArray, IntArray
from mmrl_algorithms.grpo import GRPO


class GiGPO(GRPO):
    class Config(GRPO.Config):
        gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
        """Discount of later turns in a turn's return."""
        step_weight: NotNegative = 1.0
        """Weight of the turns' advantages beside those of episodes; 0 is `grpo`."""
        normalise: Literal["std", "none"] = "std"
        """std divides both advantages by the deviation of their group; none leaves them as differences."""
        outcome: bool = True
        """Rewards that are not the environment's count as one of the last turn."""

    config: Config

    def needs(self) -> Needs:
        return replace(super().needs(), turns=True)

    def check(self, run: RunFacts) -> Sequence[str]:
        if ENVIRONMENT not in run.rewards:
            raise ValueError("gigpo gives credit to turns, and there is no environment; name one, or use grpo")
        return super().check(run)

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        assert batch.turns is not None
        states_N = anchors(batch)
        returns = turn_returns(batch, self.config.gamma, outcome=self.config.outcome)
        valid_N = np.repeat(batch.valid, [len(each) for each in returns])
        of_turns_N = self._relative(np.concatenate([np.zeros(0), *returns]), states_N, valid_N)
        of_turns = np.split(of_turns_N, np.cumsum([len(each) for each in returns])[:-1])
        of_episodes_B = self._relative(less_sequence_kl(rewards, kl), batch.group_ids, batch.valid)
        weight = self.config.step_weight
        rows = zip(of_episodes_B, of_turns, batch.turns, batch.valid, strict=True)
        tokens = [  # an episode that failed may have tokens of turns that were never answered
            own + weight * of_turns_K[turns_T] if valid else np.zeros(len(turns_T))
            for own, of_turns_K, turns_T, valid in rows
        ]
        return Credit(tokens, metrics=_metrics(states_N[valid_N], of_turns_N[valid_N]))

    def _relative(self, values: FloatArray, groups: IntArray, valid: BoolArray) -> FloatArray:
        scale: Literal["group", "none"] = "group" if self.config.normalise == "std" else "none"
        return group_advantages(values, groups, valid, scale=scale, **self.config.std)


def turn_returns(batch: Batch, gamma: float, *, outcome: bool = True) -> list[FloatArray]:
    """B arrays (K_i,) of ``R_it = sum_{k >= t} gamma^(k - t) r_ik``; 0 in invalid rows.

    Args:
        outcome: True to count the part of a row's reward that no turn was given for as a reward of its last turn.
    """
    assert batch.turn_rewards is not None
    weight, returns = batch.weights.get(ENVIRONMENT, 1.0), list[FloatArray]()
    for reward, valid, given_K in zip(batch.rewards, batch.valid, batch.turn_rewards, strict=True):
        rewards_K = weight * np.asarray(given_K, np.float64) if valid else np.zeros(len(given_K))
        if outcome and valid and len(rewards_K):
            rewards_K[-1] += reward - rewards_K.sum()
        total = 0.0
        for turn in reversed(range(len(rewards_K))):
            rewards_K[turn] = total = rewards_K[turn] + gamma * total
        returns.append(rewards_K)
    return returns


def anchors(batch: Batch) -> IntArray:
    """(N,) for each turn of each row, in order: the number of its state among those of its prompt's episodes."""
    assert batch.turn_states is not None
    known: dict[tuple[int, str], int] = {}
    found = [
        known.setdefault((int(group), state), len(known))
        for group, states in zip(batch.group_ids, batch.turn_states, strict=True)
        for state in states
    ]
    return np.array(found, np.int64)


def _metrics(states_N: IntArray, advantages_N: FloatArray) -> dict[str, float]:
    """Metrics of the turns of valid rows."""
    _, places, counts = np.unique(states_N, return_inverse=True, return_counts=True)
    sizes_N = counts[places]
    return {
        "advantage/turn_abs_mean": float(np.abs(advantages_N).mean()) if len(sizes_N) else 0.0,
        "group/shared_states_fraction": float((sizes_N > 1).mean()) if len(sizes_N) else 0.0,
    }
