"""A step's rollouts as an algorithm sees them, its credit, and both as they are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mmrl.errors import warn_of_old_name
from mmrl.types.arrays import BoolArray, FloatArray, IntArray
from mmrl.types.prompt import GroupKey
from mmrl.types.rollout import ScoredGroup


@dataclass(frozen=True, slots=True)
class BranchedRows:
    """The trees that a batch's episodes make: each row goes on from another one of its group, or begins by itself.

    A row's first ``shared_tokens`` tokens are those of its parent, with the same log-probs. ``mmrl.ops.branching`` has
    functions of such trees.

    Attributes:
        parents: (B,) int64, the row that each one goes on from; -1 if it began by itself. A parent comes before its
            children.
        shared_tokens: (B,) int64, tokens after the prompt that it shares with its parent; 0 if that is the prompt
            alone.
    """

    parents: IntArray
    shared_tokens: IntArray


@dataclass(frozen=True)
class Batch:
    """A whole rollout batch, as ``Algorithm.credit`` sees it.

    Attributes:
        rewards: (B,) float64.
        valid: (B,) rewards that may be used.
        group_ids: (B,) int64, one id per prompt instance; not necessarily contiguous.
        masks: B arrays (T_i,) bool; False where a token gets no gradient.
        truncated: (B,) completions and episodes that a limit ended.
        components: Raw value of each reward by name, (B,) float64; NaN in a valid row means that no reward of that name
            scores rows of its source, and leaves it out of the sum.
        weights: Factor of each component in ``rewards``; 0 of those that are a part of another, ``<label>/<name>``.
        penalties: Names of the components that are penalties (``Reward.penalty``).
        greedy_components: Components of the greedy rollout of each row's prompt, (B,) float64; None unless ``needs``
            asked.
        old_logprobs: B arrays (T_i,), the learner's before the update; None unless ``needs`` asked or several
            optimizer steps follow.
        reference_logprobs: B arrays (T_i,); None unless ``needs`` asked.
        sampler_logprobs: B arrays (T_i,) as the sampler reported them; zeros for what nobody sampled.
        values: B arrays (T_i,), the critic's at each place that predicts a token; None unless ``needs`` asked.
        final_values: (B,) the critic's after the last token of ``truncated`` rows, and 0 for the others, which no state
            follows; None unless ``needs`` asked for ``values`` and ``last_state``.
        pretrains: True in the first steps of a run, ``critic.pretrain_steps``, in which the critic alone learns.
        turns: B arrays (T_i,) int, the turn of an episode that each token belongs to; inserted tokens belong to the
            turn before them. None without an environment, as are all that follow.
        turn_rewards: B arrays (K_i,) with the environment's reward of each turn.
        turn_states: B sequences of K_i texts, equal where the policy acted upon the same state: what it last read.
        mismatched_logprobs: B arrays, each row's prompt with another row's completion: the next one, in the order of
            the batch and cyclically, whose prompt and completion both differ; (T_j,) the policy's before the update,
            empty where there is none. None unless ``needs`` asked.
        mismatched_reference_logprobs: The same under the reference; None unless ``needs`` asked for both.
        sampled_from: The view that each row was sampled from, which its ``sampler_logprobs`` are about; empty for the
            prompt's own images. None if no row was sampled from a view.
        given: (B,) True for demonstrations, one of each group; None unless ``needs`` asked.
        recalled: (B,) True for rollouts of earlier steps; their ``sampler_logprobs`` are those of the weights that
            sampled them. None unless ``needs`` asked for ``experience``.
        token_rewards: B arrays (T_i,) float64, the sum of what rewards say of the parts of the text that end with each
            token, times the rewards' weights; 0 in rows that are not valid. None unless ``needs`` asked.
        branches: The rows that go on from other rows; None unless ``needs`` asked.
    """

    rewards: FloatArray
    valid: BoolArray
    group_ids: IntArray
    masks: Sequence[BoolArray]
    truncated: BoolArray
    components: Mapping[str, FloatArray]
    old_logprobs: Sequence[FloatArray] | None
    reference_logprobs: Sequence[FloatArray] | None
    sampler_logprobs: Sequence[FloatArray]
    weights: Mapping[str, float] = field(default_factory=dict)
    penalties: frozenset[str] = frozenset()
    greedy_components: Mapping[str, FloatArray] | None = None
    values: Sequence[FloatArray] | None = None
    final_values: FloatArray | None = None
    turns: Sequence[IntArray] | None = None
    turn_rewards: Sequence[FloatArray] | None = None
    turn_states: Sequence[Sequence[str]] | None = None
    sampled_from: Sequence[str] | None = None
    mismatched_logprobs: Sequence[FloatArray] | None = None
    mismatched_reference_logprobs: Sequence[FloatArray] | None = None
    pretrains: bool = False
    given: BoolArray | None = None
    recalled: BoolArray | None = None
    token_rewards: Sequence[FloatArray] | None = None
    branches: BranchedRows | None = None

    def component(self, name: str) -> FloatArray:
        """(B,) values of a component; NaN where no reward has answered one of that name."""
        return self.components.get(name, np.full(len(self.rewards), np.nan))


@dataclass(frozen=True, slots=True, init=False)
class Credit:
    """The credit of each rollout, or of each of its tokens.

    Attributes:
        advantages: (B,), or B arrays (T_i,).
        keep: (B,) rows that enter the loss; None keeps all valid ones. Acts before weights are computed.
        metrics: Further numbers to log.
        constants: Numbers of this step for ``loss``, which other processes compute.
        returns: B arrays (T_i,) that the critic learns to predict; asked for with ``Needs.values`` alone.
    """

    advantages: FloatArray | Sequence[FloatArray]
    keep: BoolArray | None
    metrics: Mapping[str, float]
    constants: Mapping[str, float]
    returns: Sequence[FloatArray] | None

    def __init__(
        self,
        advantages: FloatArray | Sequence[FloatArray] | None = None,
        keep: BoolArray | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
        constants: Mapping[str, float] = MappingProxyType({}),
        returns: Sequence[FloatArray] | None = None,
        *,
        values: FloatArray | Sequence[FloatArray] | None = None,
    ) -> None:
        """``values`` is version 0.2.0's name of the advantages."""
        if values is not None:
            warn_of_old_name("Credit(values=...)", "Credit(advantages=...)")
            advantages = values
        if advantages is None:
            raise TypeError("a Credit needs advantages")
        given = {"advantages": advantages, "keep": keep, "metrics": metrics, "constants": constants, "returns": returns}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def values(self) -> FloatArray | Sequence[FloatArray]:
        """The advantages; goes with the next version."""
        warn_of_old_name("Credit.values", "Credit.advantages")
        return self.advantages


@dataclass(frozen=True, slots=True)
class PreUpdateStatistics:
    """One rollout's statistics before an optimizer step; all arrays are empty if the step came to nothing.

    Attributes:
        logprobs: (T_i,) float32, the learner's; empty of a network with a score head.
        entropy: (T_i,) float32, as ``PackedTokens.entropy_T``; likewise.
        views: The same given each scored view of its prompt, by name.
        final_value: The score after its last token; None of a network without a score head, and if the step came to
            nothing.
        vpreds: (T_i,) float32, the critic's values; empty of any other network.
    """

    logprobs: FloatArray
    entropy: FloatArray
    views: Mapping[str, PreUpdateStatistics] = field(default_factory=dict)
    final_value: float | None = None
    vpreds: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class CreditedGroup:
    """A group and the step's results; a group that was not trained on has advantages 0 and no log-probs.

    Attributes:
        advantages: G arrays (T_i,).
        logprobs: G arrays (T_i,), the learner's before the update; empty where the rollout is in no loss.
        trained: True if the step has learned from it.
        reference_logprobs: G arrays (T_i,); none where the algorithm needs no reference policy.
        updates: For each rollout, the optimizer steps that took it in, in order; none where it is in no loss.
        mismatched_logprobs, mismatched_reference_logprobs: As ``Batch`` has them, G arrays; none where the algorithm
            does not ask for them.
        final_values: (G,) float32 scores of a reward model before the update, NaN where the rollout is in no loss; or
            ``Batch.final_values`` of a critic; empty without these.
        values: G arrays (T_i,), the critic's before the step; none without a critic, as the next two.
        returns: G arrays (T_i,), which the critic learns.
        critic_updates: As ``updates``, the optimizer steps of the critic.
    """

    scored: ScoredGroup
    advantages: Sequence[FloatArray]
    logprobs: Sequence[FloatArray]
    trained: bool = False
    reference_logprobs: Sequence[FloatArray] = ()
    updates: Sequence[Sequence[PreUpdateStatistics]] = ()
    mismatched_logprobs: Sequence[FloatArray] = ()
    mismatched_reference_logprobs: Sequence[FloatArray] = ()
    final_values: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    values: Sequence[FloatArray] = ()
    returns: Sequence[FloatArray] = ()
    critic_updates: Sequence[Sequence[PreUpdateStatistics]] = ()

    @property
    def key(self) -> GroupKey:
        return self.scored.key

    def log_ratio(self, member: int) -> FloatArray | None:
        """(T_i,) float64, log-ratios of policy and reference of a rollout in the loss; None without a reference."""
        if not len(self.reference_logprobs):
            return None
        return np.asarray(self.logprobs[member], np.float64) - self.reference_logprobs[member]
