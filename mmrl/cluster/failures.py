"""The errors of calls to ranks, and the one among them that explains the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from mmrl.engine.machine.start_errors import tells_of_a_lost_rank
from mmrl.errors import DeviceMemoryError, MMRLError, RankLostError

LOOK = (
    "look at what it wrote last (Ray's logs, usually /tmp/ray/session_latest/logs), and whether its node ran out of "
    "memory"
)
LESS_MEMORY = (
    "give the ranks of a node less to hold: "
    "learner.zero_stage: 3 shares weights and optimizer out, and without GPUs a lower learner.tokens_per_microbatch or "
    "sampler.engine.kv_cache_memory_bytes, or fewer ranks on a node"
)
"""The remedy when the memory of a node, not that of its devices, ran out."""


class DeadRankError(RankLostError):
    """A rank's process is gone.

    Args:
        doing: The call that it did not answer; empty for none.
        name: Its name for people; empty for ``rank`` and its number.
    """

    def __init__(self, rank: int, host: str, doing: str, reason: str, remedy: str = LOOK, *, name: str = "") -> None:
        where = f"while it did `{doing}`" if doing else "while it had nothing to do"
        super().__init__(f"{name or f'rank {rank}'} is gone: {reason}", where=f"{host}, {where}", remedy=remedy)
        self.rank = rank


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """The first loss of a rank, else a full device, else a loss that others tell of, else our first error, or any."""
    lost = [error for error in errors if isinstance(error, RankLostError)]
    full = [error for error in errors if isinstance(error, DeviceMemoryError)]
    losses = [loss for error in errors if (loss := loss_of(error))]
    ours = [error for error in errors if isinstance(error, MMRLError)]
    return (lost or full or losses or ours or errors)[0]


def loss_of(error: BaseException) -> RankLostError | None:
    """The loss of a rank that another rank's error, a text with a traceback, follows from; None if from none."""
    text = str(error)
    if isinstance(error, MMRLError) or not tells_of_a_lost_rank(text):
        return None
    loss = RankLostError("a rank has lost another one", where=text.strip().splitlines()[-1][:300], remedy=LOOK)
    loss.__cause__ = error
    return loss


def errors_of(futures: Iterable[Future[Any]]) -> list[BaseException]:
    """The errors of the calls that have failed so far."""
    return [error for future in futures if future.done() and (error := future.exception())]
