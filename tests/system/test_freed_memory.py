from __future__ import annotations

import ctypes

import psutil
import pytest

from mmrl.system.freed_memory import FreedMemory

MIB = 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_is_given_back_once_it_may_be_much() -> None:
    process, freed = psutil.Process(), FreedMemory(0)
    assert freed.give_back()
    freed._kept_bytes = 64 * MIB
    assert not freed.give_back()
    parts = [b"x" * 60_000 for _ in range(4000)]  # small enough for the heap, of which the last one holds the top
    last = parts.pop()
    parts.clear()
    before = process.memory_info().rss
    assert freed.give_back()
    assert before - process.memory_info().rss > 100 * MIB, last[:1]
    assert not freed.give_back()


def test_nothing_is_done_with_another_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not FreedMemory(0).give_back()
