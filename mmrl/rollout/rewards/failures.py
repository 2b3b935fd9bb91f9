"""Rewards that fail: each failure is an error that says all, or one of a count that must stay small."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

from mmrl.errors import PluginError
from mmrl.types import Rollout, SampleKey

MAX_FAILED_SHARE = 0.05
"""Share of a step's rollouts; if more of them fail, the others are no fair sample of the policy."""
_EXCERPT = 100


class RewardError(PluginError):
    """A reward raised, answered something else than scores, or hung or crashed too often."""

    def __init__(self, what: str, *, details: str = "", where: str = "", possible: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, possible=possible, remedy=remedy)
        self.details = details


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that is left unscored because a reward hung, crashed, raised where that is skipped, or says why.

    Attributes:
        reward: Its label.
        cause: A clause to be read after the reward's name.
        details: Its traceback, if it raised.
    """

    reward: str
    rollout: Rollout
    cause: str
    details: str = ""


class Failures:
    """The failures of one step, counted against its rollouts; any number of threads may share them.

    Beside them are the reasons of rewards for what they cannot score, which are no failures.

    Args:
        bounded: True if more than ``MAX_FAILED_SHARE`` of the rollouts are too many.

    Attributes:
        too_many: Raises RewardError as soon as there are too many.
    """

    def __init__(self, *, bounded: bool = True) -> None:
        self.too_many: Future[NoReturn] = Future()
        self._bounded, self._num_rollouts = bounded, 0
        self._all: list[Failure] = []
        self._unscored: list[Failure] = []
        self._failed: set[SampleKey] = set()
        self._lock = threading.Lock()

    def expect(self, num_rollouts: int) -> None:
        """Count so many more rollouts to the step."""
        self._num_rollouts += num_rollouts

    def add(self, failure: Failure) -> None:
        with self._lock:
            self._all.append(failure)
            self._failed.add(failure.rollout.key)
            excess = self._bounded and len(self._failed) > MAX_FAILED_SHARE * self._num_rollouts
            if excess and not self.too_many.done():
                self.too_many.set_exception(self._error(failure))

    def explain(self, unscored: Failure) -> None:
        """Note why a reward cannot score a rollout; it does not count as failed."""
        with self._lock:
            self._unscored.append(unscored)

    def unscored_since(self, count: int) -> list[Failure]:
        """All that was explained, but the first ``count``."""
        with self._lock:
            return self._unscored[count:]

    def check(self) -> None:
        """Raises RewardError if there are too many."""
        if self.too_many.done():
            self.too_many.result()

    def since(self, count: int) -> list[Failure]:
        """All but the first ``count``."""
        with self._lock:
            return self._all[count:]

    def fractions(self, rewards: Sequence[str]) -> dict[str, float]:
        """Each reward's number of failed rollouts over the number of the step's rollouts."""
        counts = Counter(failure.reward for failure in self.since(0))
        return {name: counts[name] / max(self._num_rollouts, 1) for name in rewards}

    def _error(self, last: Failure) -> RewardError:
        counts = Counter(failure.reward for failure in self._all)
        rewards = ", ".join(f"reward {name!r} on {count}" for name, count in counts.items())
        return RewardError(
            f"rewards failed on {len(self._failed)} of the step's {self._num_rollouts} rollouts: {rewards}; "
            f"the last one, {last.reward!r}, {last.cause}",
            where=describe([last.rollout]),
            possible=f"up to {MAX_FAILED_SHARE:.0%} of a step, which are left unscored",
            remedy="correct the reward, or raise its timeout_s if it only needs longer; "
            "`mmrl rewards test` tries it on recorded completions",
            details=last.details,
        )


def reward_error(reward: str, reply: Mapping[str, Any], rollouts: Sequence[Rollout] = ()) -> RewardError:
    """A worker's reply about these rollouts as an error."""
    return RewardError(
        f"reward {reward!r} {reply['what']}",
        where="; ".join(filter(None, [describe(rollouts), reply.get("place")])),
        possible=reply.get("possible", ""),
        remedy=reply.get("remedy", "correct the reward"),
        details=reply.get("details", ""),
    )


def describe(rollouts: Sequence[Rollout]) -> str:
    """The rollouts' names, and the start of the first one's prompt."""
    if not rollouts:
        return ""
    first, last = rollouts[0], rollouts[-1]
    prompt = f"prompt {first.prompt.id!r}"
    if first.prompt.id != last.prompt.id:
        return f"{len(rollouts)} rollouts from {prompt} to {last.prompt.id!r}"
    members = f"rollout {first.index}" if first is last else f"rollouts {first.index} to {last.index}"
    text = first.messages[-1].content if first.messages else first.prompt.text
    shown = repr(text[:_EXCERPT]) + ("..." if len(text) > _EXCERPT else "")
    return f"{prompt}, {members}" + (f", which asks {shown}" if text else "")
