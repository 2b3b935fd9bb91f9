"""Groups that are scored in the background while others are still sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from mmrl.config.sections import Config
from mmrl.errors import MMRLError, plural
from mmrl.rollout.episodes.scoring import EpisodeScoring, score_episodes
from mmrl.rollout.rewards.failures import Failure, Failures, describe
from mmrl.rollout.rewards.scorer import Scorer, Scoring
from mmrl.types import RolloutGroup, ScoredGroup

Keep = Callable[[ScoredGroup, Sequence[Failure]], object]
"""Called with a group as soon as it is scored, and with the failures of rewards on its rollouts."""

_K = TypeVar("_K", bound=Hashable)


class GroupScores(Generic[_K]):
    """The groups of one call that are being scored, each by a key of the caller's.

    Args:
        failures: The step's; those from now on are told.
        event: Called with a kind and fields for each rollout that a reward failed on.
        keep: Called once with each group that is scored, and with the failures of rewards on it since now.
        needed: As of ``Scorer.submit``.
    """

    def __init__(
        self,
        config: Config,
        scorer: Scorer,
        failures: Failures,
        event: Callable[..., None],
        *,
        keep: Keep | None = None,
        needed: bool = True,
    ) -> None:
        self._config, self._scorer, self._failures, self._event = config, scorer, failures, event
        self._keep, self._needed = keep, needed
        self._known, self._explained = len(failures.since(0)), len(failures.unscored_since(0))
        self._scorings: dict[_K, Scoring | EpisodeScoring] = {}
        self._unkept = dict[_K, None]()  # in the order of their ends; only those left are looked at for each new one

    def __len__(self) -> int:
        return len(self._scorings)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Keep what is scored, and tell of failures, however the block ends."""
        try:
            yield
        finally:
            for key in self._done:
                with suppress(MMRLError):  # another error is raised already
                    self.result(key)
            for failure in self._failures.since(self._known):
                self._report(failure)
            self._report_unscored(self._failures.unscored_since(self._explained))

    def add(self, key: _K, group: RolloutGroup) -> None:
        """Score a group in the background, and keep those that are scored."""
        environment, rewards = self._config.environment, self._config.rewards
        if environment is None:
            self._scorings[key] = self._scorer.submit(group, self._failures, needed=self._needed)
        else:
            args = self._scorer, rewards, environment.weights, group, self._failures
            self._scorings[key] = score_episodes(*args, needed=self._needed)
        if self._keep is not None:
            self._unkept[key] = None

    def keep_done(self) -> None:
        """Keep the groups that are scored by now."""
        for key in self._done:
            self.result(key)

    def result(self, key: _K) -> ScoredGroup:
        """A group's scores, when they are there; keeps it."""
        scored = self._scorings[key].result()
        if self._keep is not None and key in self._unkept:
            own = [each for each in self._failures.since(self._known) if each.rollout.prompt.key == scored.key]
            self._keep(scored, own)
            del self._unkept[key]
        return scored

    @property
    def _done(self) -> list[_K]:
        """Groups that are scored and still to be kept; none without ``keep``."""
        return [key for key in self._unkept if self._scorings[key].done()]

    def _report(self, failure: Failure) -> None:
        message = f"reward {failure.reward!r} {failure.cause}: {describe([failure.rollout])}"
        self._event(
            "reward_failed",
            message=message,
            reward=failure.reward,
            prompt=failure.rollout.prompt.id,
            epoch=failure.rollout.prompt.epoch,
            member=failure.rollout.index,
            cause=failure.cause,
            details=failure.details,
        )

    def _report_unscored(self, unscored: Sequence[Failure]) -> None:
        """Tell of each reward how many rollouts it has left unscored, and why the first one."""
        counts = Counter(each.reward for each in unscored)
        for first in {each.reward: each for each in reversed(unscored)}.values():
            count, of = counts[first.reward], first.rollout
            left = f"reward {first.reward!r} left {plural(count, 'rollout')} unscored"
            message = f"{left}; of {describe([of])} it {first.cause}"
            where = {"prompt": of.prompt.id, "epoch": of.prompt.epoch, "member": of.index}
            self._event(
                "reward_unscored", message=message, reward=first.reward, count=count, cause=first.cause, **where
            )
