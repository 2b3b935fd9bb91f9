"""The watchdog of a block: what it calls, when, and that it calls nothing afterwards."""

from __future__ import annotations

import threading
import time

import pytest

from mmrl.system.watchdog import Watchdog


@pytest.mark.parametrize(
    ("is_interrupted", "takes_s", "expected"),
    [
        (True, 0.0, []),
        (True, 0.6, ["interrupt"]),
        (True, 1.5, ["interrupt", "end"]),
        (False, 0.6, ["interrupt", "end"]),
    ],
)
def test_a_block_that_takes_too_long_is_interrupted_and_at_last_ended(is_interrupted, takes_s, expected, monkeypatch):
    monkeypatch.setattr("mmrl.system.watchdog.GRACE_S", 0.6)
    calls: list[str] = []

    def interrupt(what: str) -> bool:
        calls.append("interrupt")
        return is_interrupted

    with Watchdog(0.3, interrupt, lambda what: calls.append("end")).watch("a step"):
        time.sleep(takes_s)
    time.sleep(0.7)
    assert calls == expected


def test_a_block_does_not_end_while_it_is_interrupted():
    """Or what comes after it would be."""
    begun, finished = threading.Event(), threading.Event()

    def interrupt(what: str) -> bool:
        begun.set()
        time.sleep(0.5)
        finished.set()
        return True

    with Watchdog(0.1, interrupt, print).watch("a step"):
        begun.wait(5)
    assert finished.is_set()
