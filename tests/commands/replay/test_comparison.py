"""What differs between a step's record and what it comes to now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mmrl.commands.replay.comparison import update_part
from mmrl.commands.replay.report import StepReport


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


def test_each_line_of_a_note_is_a_line_and_its_controls_are_harmless() -> None:
    report = StepReport("run", 2, 8, [], [], ["no record of log-probs\n  where:    algorithm: kto\x1b[2J"], None)
    lines = [*report.lines()]
    assert lines[1:2] == ["  note: no record of log-probs"] and lines[2].startswith("    where:    algorithm: kto")
    assert not any(set(line) & {"\n", "\x1b"} for line in lines)
