"""The needs of an algorithm: what it asks of a run as data, so that nothing asks for its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mmrl.interfaces.views import View
from mmrl.token_columns import COLUMNS, MISMATCHED_COLUMNS, POLICY, TokenColumn

Starvation = Literal["train_partial", "skip", "stop"]


@dataclass(frozen=True, slots=True)
class Refill:
    """Replacement of groups that ``Algorithm.select`` rejects: in rounds, each by the next prompt's group.

    Attributes:
        max_rounds: Rounds of replacements after the first sampling of a step.
        on_starvation: Action on a batch that is still not full: ``train_partial`` on the groups there are, ``skip``
            the update and keep the groups for the next step, or ``stop`` the run.
    """

    max_rounds: int = 10
    on_starvation: Starvation = "train_partial"

    def __post_init__(self) -> None:
        if self.max_rounds < 0 or self.on_starvation not in get_args(Starvation):
            raise ValueError(f"max_rounds is at least 0 and on_starvation one of {', '.join(get_args(Starvation))}")


@dataclass(frozen=True, slots=True)
class Branches:
    """Episodes of a group that go on from others of it, before turns that ``Algorithm.branch`` names.

    A group begins with ``sampler.group_size - rounds * per_round`` episodes, and has ``sampler.group_size`` in the end.
    A round begins when all episodes of the step that are there so far are over.

    Attributes:
        rounds: Times that further episodes begin.
        per_round: Further episodes of a group in each round.
    """

    rounds: int = 1
    per_round: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.per_round < 1:
            raise ValueError(f"rounds and per_round are at least 1, not {self.rounds} and {self.per_round}")

    @property
    def count(self) -> int:
        """Episodes of a group that go on from others."""
        return self.rounds * self.per_round


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of an algorithm beyond rollouts and rewards.

    Values that it does not ask for are None in ``Batch`` and ``PackedTokens``, unless the run has them anyway.

    Attributes:
        reference_logprobs: Log-probs of the frozen initial policy, or of a teacher (``reference.path`` of the config);
            loads a second model.
        old_logprobs: The learner's log-probs before ``credit``, even when one optimizer step follows.
        rewards: Completions are scored, and one that a reward cannot score is not valid. False: a run may do without
            rewards, and all completions are valid; those that there are, are metrics.
        min_group_size: Rollouts per prompt without which the estimator is undefined.
        greedy_rollout: One more rollout per prompt at temperature 0, scored and never trained on.
        entropy_gradient: ``PackedTokens.entropy_T`` with gradient.
        refill: ``select`` is asked, and rejected groups are replaced; None trains on all sampled groups.
        turns: ``Batch.turns``, ``turn_rewards`` and ``turn_states``, which only a run with an environment has.
        values: ``Batch.values``, of a critic that is trained beside the policy (section ``critic`` of the config) on
            ``Credit.returns`` and by ``Algorithm.value_loss``.
        whole_groups: All rows of a group are in one micro-batch of one rank, and in one minibatch. A group of which the
            credit keeps a single row is an error.
        mismatched: ``Batch.mismatched_logprobs``, and with ``reference_logprobs`` those of the reference.
        last_state: Rows keep the last token of their completion: ``PackedTokens.final_values_N``. Completions of the
            dataset then end with what the chat template closes a conversation with. Of a reward model; beside
            ``values`` it asks for ``Batch.final_values``, the critic's.
        all_turns: Every turn of the assistant after the first question that is not empty is learned where a
            demonstration is a conversation, and not the last one alone.
        views: Second forms of the prompts' images: ``PackedTokens.views`` has what the policy makes of those that are
            scored, and a part of each group is sampled from the others.
        demonstration: Each group has one member more, its last: the row's demonstration, which rewards score and the
            step learns as any other. Nobody sampled it: ``Batch.given`` and ``PackedTokens.given_N`` tell it apart. A
            row without a demonstration is not of use.
        experience: Rollouts that the run keeps of each prompt, from step to step and in checkpoints:
            ``Algorithm.remember`` chooses them, and ``Algorithm.recall`` gives them places in later groups of the
            prompt. ``Batch.recalled`` tells these apart.
        token_rewards: ``Batch.token_rewards``, of the parts of texts that rewards value (``Spans``).
        branches: ``branch`` is asked, and a part of each group are episodes that go on from others of it; only in a run
            with an environment. ``Batch.branches`` tells which. Greedy rollouts and evaluations have none.
    """

    reference_logprobs: bool = False
    old_logprobs: bool = False
    rewards: bool = True
    min_group_size: int = 1
    greedy_rollout: bool = False
    entropy_gradient: bool = False
    refill: Refill | None = None
    turns: bool = False
    values: bool = False
    whole_groups: bool = False
    mismatched: bool = False
    last_state: bool = False
    all_turns: bool = False
    views: tuple[View, ...] = ()
    demonstration: bool = False
    experience: int = 0
    token_rewards: bool = False
    branches: Branches | None = None

    def __post_init__(self) -> None:
        if self.experience < 0:
            raise ValueError(f"experience is a number of rollouts of a prompt, 0 or more, not {self.experience}")

    def columns(self, updates: int, network: str = POLICY) -> tuple[TokenColumn, ...]:
        """The token columns that a run has, the same in all of its steps.

        Args:
            updates: Optimizer steps on each batch. After the first of several the policy is another, so what it
                computed before the step is kept, asked for or not.
            network: As ``Algorithm.network``; without a policy there are no columns of a network.
        """
        return tuple(
            column
            for column in COLUMNS
            if (not column.role or network == POLICY)
            and (not column.need or getattr(self, column.need) or (column.role == POLICY and updates > 1))
        )

    @property
    def mismatched_columns(self) -> tuple[TokenColumn, ...]:
        """The columns that prompts with other rows' completions have too."""
        asked = MISMATCHED_COLUMNS if self.mismatched else ()
        return tuple(column for column in asked if column.role == POLICY or getattr(self, column.need))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the networks that compute these columns, the policy first."""
        return tuple(dict.fromkeys([POLICY, *(column.role for column in self.columns(1) if column.role)]))

    @property
    def scored_views(self) -> dict[str, bool]:
        """The views that are scored, by name; True with a gradient."""
        return {view.name: view.gradient for view in self.views if view.scored}

    @property
    def of_a_policy(self) -> tuple[str, ...]:
        """Needs among these that only a policy serves."""
        return tuple(name for name in _OF_A_POLICY if getattr(self, name))

    @property
    def of_sampling(self) -> tuple[str, ...]:
        """Needs among these that only a run serves which samples its groups."""
        return tuple(name for name in _OF_SAMPLING if getattr(self, name))


_OF_A_POLICY = (
    "reference_logprobs",
    "old_logprobs",
    "greedy_rollout",
    "entropy_gradient",
    "refill",
    "values",
    "mismatched",
    "views",
    "demonstration",
    "experience",
    "token_rewards",
    "branches",
)
_OF_SAMPLING = ("values", "demonstration", "experience", "token_rewards")
