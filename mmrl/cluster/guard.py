"""A node's watch over its ranks: it sees which process ended and if memory ran out, and it ends those left over."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.5
"""Seconds between two looks at the ranks."""
OOM_S = 5
"""Seconds before a rank's end in which the kernel's out-of-memory killer is counted."""
END_S = 5
"""Seconds for a killed process to be gone."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this node, told apart from a later one with the same id.

    Attributes:
        started: In clock ticks since the machine's start.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        """The process that asks."""
        return cls(os.getpid(), int(_stat(os.getpid())[19]))

    @property
    def runs(self) -> bool:
        """False when it has ended, though its parent may not have taken note."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.started and fields[0] not in "ZX"


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a rank's process.

    Attributes:
        oom_kills: Processes of the node that the kernel ended for want of memory in the ``OOM_S`` seconds before.
    """

    rank: int
    oom_kills: int


def watch(ranks: Mapping[int, Process]) -> Death:
    """Return when the first of these ranks, all of this node, has ended."""
    kills = deque([oom_kills()], maxlen=int(OOM_S / POLL_S))
    while not (gone := [rank for rank, process in ranks.items() if not process.runs]):
        time.sleep(POLL_S)
        kills.append(oom_kills())
    return Death(gone[0], oom_kills() - kills[0])


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has ended for want of memory, of the machine or of a control group, since it runs."""
    lines = [line.split() for line in counters.read_text().splitlines()]
    return next((int(count) for name, count in lines if name == "oom_kill"), 0)


def clear(processes: Sequence[Process], folder: str) -> list[Process]:
    """End processes of this node that still run, then remove a folder, if one is named; returns those that are left."""
    deadline = time.monotonic() + END_S
    for process in processes:
        with contextlib.suppress(OSError):
            if process.runs:
                os.kill(process.pid, signal.SIGKILL)
    while (left := [process for process in processes if process.runs]) and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the process's name, from its state on; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
