"""Scores of episodes: what rewards answer, and what the environment scores itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmrl.config.plugin_specs import RewardSpec
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.scorer import Scorer, Scoring
from mmrl.types import FloatArray, RolloutGroup, ScoredGroup


@dataclass(frozen=True, slots=True)
class EpisodeScoring:
    """A group of episodes that is being scored.

    Attributes:
        places: Places of the members that rewards score; episodes whose environment failed are shown to none.
        scoring: The rewards' answers to come; None if no reward scores any of it.
    """

    group: RolloutGroup
    weights: Mapping[str, float]
    rewards: Sequence[RewardSpec]
    places: Sequence[int]
    scoring: Scoring | None

    def done(self) -> bool:
        """True if ``result`` is there at once."""
        return self.scoring is None or self.scoring.done()

    def result(self, timeout_s: float | None = None) -> ScoredGroup:
        """The group with its scores, when they are there; errors as ``Scoring.result``."""
        scored = self._without_rewards() if self.scoring is None else self._spread(self.scoring.result(timeout_s))
        return with_environment(scored, self.weights)

    def _without_rewards(self) -> ScoredGroup:
        size = len(self.group.rollouts)
        components = {spec.metric: np.full(size, np.nan) for spec in self.rewards}
        return ScoredGroup(self.group, np.zeros(size), np.ones(size, np.bool_), components)

    def _spread(self, scored: ScoredGroup) -> ScoredGroup:
        """The scores of some members as those of all."""
        size, places = len(self.group.rollouts), list(self.places)
        if len(places) == size:
            return scored
        rewards, valid = np.zeros(size), np.zeros(size, np.bool_)
        rewards[places], valid[places] = scored.rewards, scored.valid
        components: dict[str, FloatArray] = {name: np.full(size, np.nan) for name in scored.components}
        answers: dict[str, list[str | None]] = {name: [None] * size for name in scored.answers}
        for name, values in scored.components.items():
            components[name][places] = values
        for name, read in scored.answers.items():
            for place, answer in zip(places, read, strict=True):
                answers[name][place] = answer
        known = dict(zip(places, scored.token_rewards, strict=False))
        of_tokens = (
            [known.get(i, np.zeros(len(e.token_ids))) for i, e in enumerate(self.group.rollouts)] if known else []
        )
        scored = replace(scored, group=self.group, rewards=rewards, valid=valid, components=components)
        return replace(scored, answers=answers, token_rewards=of_tokens)


def score_episodes(
    scorer: Scorer,
    rewards: Sequence[RewardSpec],
    weights: Mapping[str, float],
    group: RolloutGroup,
    failures: Failures,
    *,
    needed: bool = True,
) -> EpisodeScoring:
    """Score a group of episodes in the background.

    Args:
        rewards: The scorer's.
        weights: ``environment.weights``.
        needed: As of ``Scorer.submit``.

    Raises:
        RewardError: There are too many failures in the step already.
    """
    failures.check()
    source = group.prompt.prompt.source
    places = [place for place, rollout in enumerate(group.rollouts) if not rollout.failure]
    is_scored = any(not spec.sources or source in spec.sources for spec in rewards)
    scoring = None
    if places and is_scored:
        well = replace(group, rollouts=tuple(group.rollouts[place] for place in places))
        scoring = scorer.submit(well, failures, needed=needed)
    return EpisodeScoring(group, weights, rewards, places, scoring)


def with_environment(scored: ScoredGroup, weights: Mapping[str, float]) -> ScoredGroup:
    """A group with the components that its environment has scored.

    A missing one makes its episode invalid, and so does a sum that is not finite, such as that of huge rewards.

    Args:
        weights: Factor of each component in the reward; 1 of those that it does not name.
    """
    rollouts = scored.rollouts
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.components)
    found = {name: np.array([_number(rollout.components.get(name)) for rollout in rollouts]) for name in names}
    total = scored.rewards + sum((weights.get(name, 1.0) * values for name, values in found.items()), np.zeros(()))
    valid = scored.valid & np.isfinite(total) & np.array([not rollout.failure for rollout in rollouts], np.bool_)
    return replace(scored, rewards=np.where(valid, total, 0.0), valid=valid, components={**scored.components, **found})


def _number(value: float | None) -> float:
    return np.nan if value is None else value
