"""What differs between a step's record and what it comes to now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mmrl.commands.replay.comparison import update_part


def test_rollouts_of_the_ledger_alone_and_of_the_replay_alone_are_differences() -> None:
    first, second, other = (0, "p1", 0), (0, "p1", 1), (1, "p1", 0)
    now: Any = SimpleNamespace(updates=[[first, second], [second]])
    part = update_part(now, [[first, other], [second], [other]])
    assert (part.compared, part.unit) == (3, "optimizer steps")
    assert [(found.what, found.was, found.now, found.rollout) for found in part.differences] == [
        ("in optimizer step 1", True, False, other),
        ("in optimizer step 1", False, True, second),
        ("in optimizer step 3", True, False, other),
    ]
