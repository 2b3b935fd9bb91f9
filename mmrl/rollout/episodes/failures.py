"""Environments that fail: each failed call makes its episode invalid; too many of them end the run."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.errors import PluginError

MAX_FAILED_SHARE = 0.05
"""Share of a step's calls; if more of them fail, the other episodes are no fair sample of the policy."""


class EpisodeError(PluginError):
    """An environment cannot be made, or fails too often."""


class CallFailed(Exception):
    """A call that an environment did not answer as it must.

    Attributes:
        cause: A clause to be read after the environment's name.
        details: Its traceback, if it raised.
    """

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(cause)
        self.cause, self.details = cause, details


@dataclass(slots=True)
class CallTally:
    """The calls of one step, and those of them that failed.

    A single failure among several calls is never too many. The share of failures is that of the calls which the step
    will have made if every episode takes all of its turns. So a step is stopped before its end only if the share cannot
    fall again; ``finish`` looks once more.

    Args:
        environment: Its name.

    Attributes:
        made: Calls so far; ``Environment.close`` is none.
        failed: Calls that failed.
        possible: Calls that the episodes under way may still make, at most.
    """

    environment: str
    made: int = 0
    failed: int = 0
    possible: int = 0
    _last: tuple[CallFailed, str] | None = None

    @property
    def failed_fraction(self) -> float:
        """Failed calls over calls; 0 without any."""
        return self.failed / max(self.made, 1)

    def call(self) -> None:
        """Count a call that was possible as made."""
        self.made, self.possible = self.made + 1, self.possible - 1

    def fail(self, failure: CallFailed, where: str) -> None:
        """Count a failure.

        Raises:
            EpisodeError: There are too many.
        """
        self.failed += 1
        self._last = failure, where
        self._check(self.made + self.possible)

    def finish(self) -> None:
        """Look at the calls of the whole step, now that it will make no more.

        Raises:
            EpisodeError: Too many have failed.
        """
        self._check(self.made)

    def _check(self, most: int) -> None:
        if self._last is None:
            return
        failure, where = self._last
        if self.failed > MAX_FAILED_SHARE * most and (self.failed > 1 or most == 1):
            error = EpisodeError(
                f"environment {self.environment!r} failed in {self.failed} of the step's {self.made} calls; "
                f"the last time, it {failure.cause}",
                where=where,
                possible=f"up to {MAX_FAILED_SHARE:.0%} of a step's calls, whose episodes are left out",
                remedy="correct the environment, or raise environment.timeout_s if it only needs longer",
            )
            error.details = failure.details
            raise error
