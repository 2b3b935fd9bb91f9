"""Groups that are not only what was sampled: rejected ones that are sampled once more, and kept rollouts in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.errors import contract_error, plugin_errors
from mmrl.interfaces import Algorithm
from mmrl.rollout.kept import Kept, experience_of
from mmrl.types import IMAGE_PLACEHOLDER, EncodedPrompt, Experience, Prompt, Rollout, RolloutGroup, ScoredGroup


def retried(algorithm: Algorithm, group: ScoredGroup) -> Prompt | None:
    """The row to sample once more in place of a rejected group; None for the next row.

    Raises:
        PluginError: ``Algorithm.retry`` raised, or answered anything but None or the row with other messages.
    """
    row = group.group.prompt.prompt
    with plugin_errors(algorithm, "retry"):
        asked = algorithm.retry(group)
    if asked is None:
        return None
    remedy = "return None, or dataclasses.replace(group.group.prompt.prompt, messages=...)"
    if not isinstance(asked, Prompt):
        raise contract_error(algorithm, "retry", f"answered {type(asked).__name__}, and no Prompt", remedy)
    if asked.id != row.id:
        raise contract_error(algorithm, "retry", f"answered row {asked.id!r} for row {row.id!r}", remedy)
    if asked.images != row.images:
        raise contract_error(algorithm, "retry", "answered the row with other images", remedy, where=row.id)
    if (count := _placeholders(asked)) != (expected := _placeholders(row)):
        what = f"answered messages with {count} times {IMAGE_PLACEHOLDER}, and the row has {expected}"
        raise contract_error(algorithm, "retry", what, remedy, where=row.id)
    return replace(asked, retries=row.retries + 1)


def _placeholders(row: Prompt) -> int:
    return sum(message.content.count(IMAGE_PLACEHOLDER) for message in row.messages)


class Memory:
    """Rollouts of earlier groups, while a step samples.

    Args:
        algorithm: Asks for ``experience``.

    Attributes:
        kept: All that are kept now.
    """

    def __init__(self, algorithm: Algorithm, kept: Kept) -> None:
        self._algorithm, self.kept = algorithm, kept

    def exchanged(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Groups that were just scored, with kept rollouts in places of members; then members of theirs are kept.

        Raises:
            PluginError: ``Algorithm.recall`` or ``remember`` raised, or named what is not there.
        """
        return [self._exchanged(group) for group in groups]

    def _exchanged(self, group: ScoredGroup) -> ScoredGroup:
        name = group.group.prompt.id
        kept = [each for each in self.kept.get(name, ()) if _is_of(group.group.prompt, each.rollout)]
        found = self._recalled(group, kept) if kept else group
        if new := self._remembered(group):
            kept_now = (*self.kept.get(name, ()), *new)[-self._algorithm.needs().experience :]
            self.kept = {**self.kept, name: kept_now}
        return found

    def _remembered(self, group: ScoredGroup) -> list[Experience]:
        with plugin_errors(self._algorithm, "remember"):
            places = list(self._algorithm.remember(group))
        allowed = [place for place in _own(group) if group.valid[place]]
        self._check("remember", places, allowed, "valid members", "return places of group.rollouts where group.valid")
        return [experience_of(group, int(place)) for place in places]

    def _recalled(self, group: ScoredGroup, kept: Sequence[Experience]) -> ScoredGroup:
        with plugin_errors(self._algorithm, "recall"):
            answer = dict(self._algorithm.recall(group, kept))
        remedy = "return {member: place in kept}"
        self._check("recall", list(answer), _own(group), "members", remedy)
        self._check("recall", list(answer.values()), range(len(kept)), "kept rollouts", remedy)
        for member, place in answer.items():
            group = _with(group, int(member), kept[place])
        return group

    def _check(self, hook: str, places: Sequence[Any], allowed: Sequence[int], what: str, remedy: str) -> None:
        """See that these are places among some, each once."""
        known = {*allowed}
        wrong = [place for place in places if not isinstance(place, int | np.integer) or int(place) not in known]
        if wrong or len({*places}) < len(places):
            found = f"named {wrong[0]!r}" if wrong else f"named one of {list(places)} twice"
            of = f", and the {what} are {', '.join(map(str, sorted(known))) or 'none'}"
            raise contract_error(self._algorithm, hook, found + of, remedy)


def _own(group: ScoredGroup) -> list[int]:
    """Places of the members that were sampled."""
    return [place for place, rollout in enumerate(group.rollouts) if rollout.is_own]


def _is_of(prompt: EncodedPrompt, rollout: Rollout) -> bool:
    """True if a rollout goes on from the tokens and the images of a prompt."""
    own = rollout.prompt
    same = [image.hash for image in own.images] == [image.hash for image in prompt.images]
    return same and np.array_equal(own.token_ids, prompt.token_ids)


def _with(group: ScoredGroup, member: int, kept: Experience) -> ScoredGroup:
    """A group with a kept rollout in a member's place; valid unless the group's greedy rollout is not."""
    prompt, valid = group.group.prompt, group.greedy is None or bool(group.greedy.valid[0])
    rollout = replace(kept.rollout, prompt=prompt, index=member, recalled=True)
    return replace(
        group,
        group=RolloutGroup(prompt, tuple(_put(group.rollouts, member, rollout))),
        rewards=np.array(_put(group.rewards, member, kept.reward if valid else 0.0), np.float64),
        valid=np.array(_put(group.valid, member, valid), np.bool_),
        components={
            name: np.array(_put(values_G, member, kept.components.get(name, np.nan)), np.float64)
            for name, values_G in group.components.items()
        },
        answers={name: _put(found, member, kept.answers.get(name)) for name, found in group.answers.items()},
        token_rewards=_put(group.token_rewards, member, kept.token_rewards) if group.token_rewards else (),
    )


def _put(values: Any, place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]
