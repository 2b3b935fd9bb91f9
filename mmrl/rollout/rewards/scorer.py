"""Groups and their scores: the rewards that score a group, the pools that they run in, and their weighted sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, cast

import numpy as np

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import ConfigError
from mmrl.interfaces import Reward
from mmrl.plugin_host import registry
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.pool import MAX_GROWTH_BYTES, RewardPool, RewardScores
from mmrl.types import FloatArray, Rollout, RolloutGroup, ScoredGroup

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)

LastTokens = Callable[[Rollout, Sequence[int]], Sequence[int]]
"""For each end of a part of a rollout's text, in characters, the place of the part's last token."""


class Scorer:
    """Scores groups with all rewards of a run; use it as a context manager.

    A reward that asks for workers has a pool of its own, the others share one. Without rewards (supervised runs) there
    are none.

    Args:
        workers: Processes that rewards share.
        max_growth_bytes: Resident memory that a worker may gain before another takes its place.
        last_tokens: Finds the tokens of parts of texts that rewards value; None, and these values are left out.

    Raises:
        PluginError: A reward is not there or cannot be made.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        workers: int = DEFAULT_WORKERS,
        *,
        max_growth_bytes: int = MAX_GROWTH_BYTES,
        last_tokens: LastTokens | None = None,
    ) -> None:
        self._rewards, self._last_tokens = tuple(rewards), last_tokens
        self._pools = reward_pools(rewards, workers, max_growth_bytes=max_growth_bytes)

    def scores(self, source: str) -> bool:
        """True if a reward scores rows of a source."""
        return any(not spec.sources or source in spec.sources for spec in self._rewards)

    def submit(self, group: RolloutGroup, failures: Failures | None = None, *, needed: bool = True) -> Scoring:
        """Score a group in the background, with the rewards that score rows of its source.

        Args:
            failures: The counts of the group's step; None sets no bound.
            needed: False if the rewards are for a person: there may be none, and all rollouts are valid.

        Raises:
            ConfigError: No reward scores such rows.
            RewardError: There are too many failures in the step already.
        """
        assert self._rewards or not needed, "nothing to score with"
        failures = Failures(bounded=False) if failures is None else failures
        failures.check()
        source = group.prompt.prompt.source
        scoring = [place for place, spec in enumerate(self._rewards) if not spec.sources or source in spec.sources]
        if not scoring and needed:
            _raise_unscored(group, self._rewards)
        parts = [
            (places, pool.submit(group.rollouts, wanted, failures))
            for places, pool in self._pools
            if (wanted := frozenset(i for i, place in enumerate(places) if place in scoring))
        ]
        return Scoring(group, self._rewards, parts, failures, needed, self._last_tokens)

    def reward(self, place: int) -> PooledReward:
        """One of the rewards alone."""
        return next(PooledReward(pool, places.index(place)) for places, pool in self._pools if place in places)

    def close(self) -> None:
        """Cancel calls that have not begun and end the workers; one that is still busy after a second is killed."""
        for _, pool in self._pools:
            pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class PooledReward:
    """One reward in its pool.

    Attributes:
        place: Its place among the pool's.
    """

    pool: RewardPool
    place: int

    def ask(self, rollouts: Sequence[Rollout], failures: Failures) -> Callable[[], RewardScores]:
        """Score rollouts of one prompt in the background; what is returned waits for the scores.

        It raises as the future of ``RewardPool.submit`` does.
        """
        future = self.pool.submit(rollouts, frozenset({self.place}), failures)
        return lambda: future.result()[self.place]


@dataclass(frozen=True, slots=True)
class Scoring:
    """A group that is being scored.

    Attributes:
        parts: For each pool that scores it, the places of the pool's rewards, and their scores to come.
        needed: As ``Scorer.submit`` was told.
        last_tokens: The scorer's.
    """

    group: RolloutGroup
    rewards: Sequence[RewardSpec]
    parts: Sequence[tuple[Sequence[int], Future[Mapping[int, RewardScores]]]]
    failures: Failures
    needed: bool = True
    last_tokens: LastTokens | None = None

    def done(self) -> bool:
        """True if ``result`` is there at once."""
        return all(future.done() for _, future in self.parts)

    def result(self, timeout_s: float | None = None) -> ScoredGroup:
        """The group with its scores, when they are there.

        Raises:
            RewardError: See ``RewardPool.submit``; as soon as there are too many failures in the step.
            TimeoutError: They are not there within ``timeout_s``, which counts for each pool.
        """
        found: dict[int, RewardScores] = {}
        for places, future in self.parts:
            either: list[Future[Any]] = [future, self.failures.too_many]
            wait(either, timeout_s, return_when=FIRST_COMPLETED)
            self.failures.check()
            found |= {places[place]: scores for place, scores in future.result(0).items()}
        return self._combined(found)

    def _combined(self, found: Mapping[int, RewardScores]) -> ScoredGroup:
        """The weighted sum; a rollout that any of the needed rewards could not score is invalid and has reward 0."""
        shape = len(self.group.rollouts)
        total, valid = np.zeros(shape), np.ones(shape, np.bool_)
        components: dict[str, FloatArray] = {spec.metric: np.full(shape, np.nan) for spec in self.rewards}
        answers: dict[str, Sequence[str | None]] = {}
        for place, spec in enumerate(self.rewards):
            if place not in found:
                continue
            values = _array(found[place].scores)
            answers |= {} if (read := found[place].answers) is None else {spec.metric: read}
            components[spec.metric] = values
            components |= self._parts(spec.metric, found[place])
            values = values if self.needed else np.nan_to_num(values)
            total += spec.weight * values
            valid &= ~np.isnan(values)
        rewards, of_tokens = np.where(valid, total, 0.0), self._token_rewards(found)
        return ScoredGroup(self.group, rewards, valid, components, answers=answers, token_rewards=of_tokens)

    def _token_rewards(self, found: Mapping[int, RewardScores]) -> Sequence[FloatArray]:
        """``ScoredGroup.token_rewards``; none where nobody asks for them."""
        if self.last_tokens is None:
            return []
        values = [np.zeros(len(rollout.token_ids)) for rollout in self.group.rollouts]
        for place, scores in found.items():
            for rollout, values_T, spans in zip(self.group.rollouts, values, scores.spans, strict=False):
                places = self.last_tokens(rollout, [end for _, end, _ in spans])
                np.add.at(values_T, list(places), [self.rewards[place].weight * value for _, _, value in spans])
        return values

    def _parts(self, label: str, scores: RewardScores) -> dict[str, FloatArray]:
        """The values that a reward answers beside its score."""
        names = dict.fromkeys(name for parts in scores.parts for name in parts)
        found = {f"{label}/{name}": _array([parts.get(name) for parts in scores.parts]) for name in names}
        for name in found.keys() & {spec.metric for spec in self.rewards}:
            raise ConfigError(
                f"reward {label!r} answers a component {name!r}, and a reward is called so too",
                where="rewards[].label",
                remedy="give one of them another label",
            )
        return found


def reward_pools(
    rewards: Sequence[RewardSpec], workers: int = DEFAULT_WORKERS, *, max_growth_bytes: int = MAX_GROWTH_BYTES
) -> list[tuple[Sequence[int], RewardPool]]:
    """The pools of some rewards, each with the places of its own; see ``Scorer``."""
    classes = [cast(type[Reward], registry.resolve("reward", spec)) for spec in rewards]
    own = [spec.workers or cls.workers for spec, cls in zip(rewards, classes, strict=True)]
    shared = [place for place, count in enumerate(own) if count is None]
    pools = [(shared, workers)] if shared else []
    pools += [([place], count) for place, count in enumerate(own) if count is not None]
    return [
        (
            places,
            RewardPool(
                [rewards[place] for place in places],
                count,
                [classes[place].groups_per_call for place in places],
                max_growth_bytes=max_growth_bytes,
                secrets=_secrets([rewards[place] for place in places if classes[place].secrets]),
            ),
        )
        for places, count in pools
    ]


def _secrets(rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """The environment variables that the rewards' options name, as far as they are set."""
    made = [registry.create("reward", spec) for spec in rewards]
    names = [getattr(reward.config, option) for reward in made for option in reward.secrets]
    return {name: os.environ[name] for name in names if name is not None and name in os.environ}


def _array(scores: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if score is None else score for score in scores], np.float64)


def _raise_unscored(group: RolloutGroup, rewards: Sequence[RewardSpec]) -> NoReturn:
    sources = "; ".join(f"{spec.metric}: {', '.join(spec.sources or ())}" for spec in rewards)
    raise ConfigError(
        f"no reward scores rows of source {group.prompt.prompt.source!r}",
        where=f"rewards[].sources, prompt {group.prompt.id!r}",
        possible=sources,
        remedy="add the source to a reward's sources, or add a reward for it",
    )
