from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import psutil
import pytest

from mmrl.system import freed_memory
from mmrl.system.freed_memory import FreedMemory

MIB = 2**20
needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
STEPS = """
import numpy as np
import psutil
from mmrl.system.freed_memory import FreedMemory, keep_freed

def grown():
    return (psutil.Process().memory_info().rss - start) / 2**20

def step(blocks):
    made = [np.ones(2**20) for _ in range(blocks)]  # 8 MiB each
    mapped = np.ones(2**23)  # 64 MiB

step(1)
start, kept, freed = psutil.Process().memory_info().rss, keep_freed(), FreedMemory(64 * 2**20)
freed._resident = start
print(kept)
for blocks in (40, 40, 40, 80, 40):
    step(blocks)
    before = grown()
    print(before, freed.give_back(), grown())
"""


def steps(**environment: str) -> list[list[str]]:
    """Returns the MiB that a process's steps leave: before they are looked at, whether it was given back, and after."""
    found = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    run = subprocess.run([sys.executable, "-c", STEPS], env=found | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


@needs_glibc
def test_memory_of_a_step_stays_for_the_next_one_and_what_grows_beyond_goes_back() -> None:
    (kept,), *found = steps()
    assert kept == "True"
    assert [given for _, given, _ in found] == ["True", "False", "False", "True", "False"]
    before, after = ([float(line[place]) for line in found] for place in (0, 2))
    assert all(310 < size < 330 for size in (*before[:3], before[4])), "large blocks go back by themselves"
    assert 630 < before[3] < 650
    assert max(after[0], after[3]) < 30, "what a start has left goes back, too"


@needs_glibc
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_hold(name: str) -> None:
    (kept,), *found = steps(**{name: {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}.get(name, "1048576")})
    assert kept == "False" and all(float(before) < 30 for before, *_ in found)


@needs_glibc
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
    assert not FreedMemory(0).give_back() and not freed_memory.keep_freed()
