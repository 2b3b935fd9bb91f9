"""Groups that are sampled in parts, over several steps, as they are between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.types import NO_VERSION, EncodedPrompt, GroupKey, Prompt, Rollout, RolloutGroup, ScoredGroup


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A group of which a part is still to be sampled.

    Attributes:
        group: Its rollouts as far as they were sampled. One that goes on has no text; its ``finish_reason`` is ``stop``
            unless an episode has ended, and waits for its score alone. The last turn of an episode may have no answer.
            The version of an episode's is that of its last whole turn.
        goes_on: True for each rollout that is not finished.
        observed: Tokens and images of the first observation, which is part of the prompt; None before episodes have
            begun, and without an environment.
        observations: For each rollout, hashes of what its environment has answered: to ``reset``, then turn by turn.
        row: The row as an environment is given it, with its raw images; None without one.
    """

    group: RolloutGroup
    goes_on: tuple[bool, ...]
    observed: tuple[int, int] | None = None
    observations: tuple[tuple[str, ...], ...] = ()
    row: Prompt | None = None

    @classmethod
    def new(cls, prompt: EncodedPrompt, size: int, *, has_environment: bool) -> UnfinishedGroup:
        """A group of which nothing is sampled yet."""
        rollouts = tuple(Rollout(prompt, (), index, "", "stop", NO_VERSION) for index in range(size))
        row = prompt.prompt if has_environment else None
        return cls(RolloutGroup(prompt, rollouts), (True,) * size, observations=((),) * size, row=row)

    @property
    def key(self) -> GroupKey:
        return self.group.prompt.key


CarriedGroup = ScoredGroup | UnfinishedGroup
"""A group for the next step: one that is finished and that no step has learned from, or one that goes on."""


def finished_among(groups: Sequence[CarriedGroup]) -> list[ScoredGroup]:
    """The finished ones, in their order."""
    return [group for group in groups if isinstance(group, ScoredGroup)]


def unfinished_among(groups: Sequence[CarriedGroup]) -> list[UnfinishedGroup]:
    """The ones that go on, in their order."""
    return [group for group in groups if isinstance(group, UnfinishedGroup)]
