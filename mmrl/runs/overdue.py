"""The end of a step that hangs: its ranks' calls are given up, else its process is ended."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from mmrl.errors import MMRLError, RankLostError
from mmrl.runs.directory import RunDirectory
from mmrl.system.signals import end_process
from mmrl.system.watchdog import Watchdog

if TYPE_CHECKING:
    from mmrl.engine_api import Engine
    from mmrl.rollout.collector import Collector

TELL_S = 5.0
"""Seconds to write down the reason why a process that hangs is ended."""


def step_watchdog(timeout_s: float | None, engine: Engine, collector: Collector, directory: RunDirectory) -> Watchdog:
    """A watchdog that abandons the engine's calls, or ends this process where that is not possible.

    Args:
        timeout_s: ``trainer.step_timeout_s``.
        collector: Knows which prompts were sampled last.
    """

    def overdue(what: str) -> RankLostError:
        latest = ", ".join(group.prompt.id for group in collector.generated[-3:])
        return RankLostError(
            f"{what} has taken more than {timeout_s:g} s",
            where=f"trainer.step_timeout_s; the last prompts sampled: {latest or 'none'}",
            remedy="look at what hangs; if nothing does, raise the limit",
        )

    def end(error: MMRLError) -> None:
        def tell() -> None:
            print(f"mmrl: {error}", file=sys.stderr, flush=True)
            directory.event("error", message=str(error), exit_code=error.exit_code)
            directory.end_attempt(error.exit_code, str(error))

        # This is the watchdog's thread; the one that hangs may do so in a write, and hold the lock that this needs.
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(TELL_S)
        end_process(error.exit_code)

    return Watchdog(timeout_s, lambda what: engine.abandon(overdue(what)), lambda what: end(overdue(what)))
