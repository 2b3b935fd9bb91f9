"""Waits for a device's memory that other processes hold, such as ranks that were just ended, and names who holds it."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmrl.engine import device
from mmrl.errors import ResourceError

PATIENCE_S = 120.0
"""Seconds that memory may take to come back: a driver frees tens of gigabytes of a killed process in a few."""
STEADY_S = 1.0
"""Seconds without a change after which memory counts as back: vLLM fails if more is freed while it measures."""
STIRRING = 64 * 2**20
"""Bytes of a change that counts: a desktop's windows take and give back some all the time."""
TELL_S = 2.0
"""Seconds after which somebody is told what is waited for."""
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of the device, as ``nvidia-smi`` tells it."""

    pid: int
    name: str
    mebibytes: str

    @property
    def is_ours(self) -> bool:
        """True if this user can end it; in a container the number may be that of another process, or of none."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            return process.uids().real == os.getuid() and Path(process.exe()).name == Path(self.name).name
        except (psutil.Error, OSError):
            return False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}) holds {self.mebibytes} MiB"


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of a device that has to be free.

    Attributes:
        share: The part of its whole memory that vLLM wants to find free.
        least_bytes: Bytes that the smallest setting takes at its peak.
    """

    share: float = 0.0
    least_bytes: int = 0

    def of(self, total: int) -> int:
        """Bytes, on a device that has ``total``; the own CUDA context is there already."""
        return max(math.ceil(self.share * total), self.least_bytes - device.RUNTIME_BYTES["cuda"])


def await_memory(
    kind: device.DeviceKind,
    need: Need,
    *,
    tell: Callable[[str], object] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return when enough of this rank's device is free and does not change any more; at once on a CPU.

    Args:
        tell: Called once with what is waited for, if it takes seconds.

    Raises:
        ResourceError: It is not free in time; says what is missing, and who holds it.
    """
    begin = since = clock()
    before, told = -1, False
    while (found := device.free_memory_bytes(kind)) is not None:
        (free, total), now = found, clock()
        if abs(free - before) > STIRRING:
            before, since = free, now
        needed = need.of(total)
        nobody_else = total - free <= device.RUNTIME_BYTES["cuda"]
        if free >= needed and (nobody_else or now - since >= STEADY_S or now - begin > PATIENCE_S):
            return
        if now - begin > PATIENCE_S:
            raise _busy(free, total, need, holders())
        if not told and now - begin > TELL_S:
            told = True
            who = ", ".join(map(str, holders())) or "nvidia-smi names no process"
            tell(f"waiting for GPU memory, {PATIENCE_S:g} s at most: {free / 1e9:.1f} GB are free; {who}")
        sleep(POLL_S)


def holders() -> list[Holder]:
    """The other processes that hold memory of this process's first GPU; none where ``nvidia-smi`` does not tell."""
    asked = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    query = ["nvidia-smi", asked, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    own = _uuid()
    found = []
    for gpu, pid, *name, used in (row for row in rows if len(row) >= 4):
        if pid.isdigit() and int(pid) != os.getpid() and (not own or own in gpu):
            found.append(Holder(int(pid), ",".join(name), used))
    return found


def _uuid() -> str:
    """The identity of the first GPU that this process sees, without ``GPU-``; empty if torch does not tell."""
    import torch

    try:
        return str(torch.cuda.get_device_properties(0).uuid)
    except (AttributeError, AssertionError, RuntimeError):
        return ""


def _busy(free: int, total: int, need: Need, who: list[Holder]) -> ResourceError:
    host, needed = socket.gethostname(), need.of(total)
    most = math.floor(100 * free / total) / 100
    fits = Need(most, need.least_bytes).of(total) <= free
    lower = f"lower sampler.gpu_memory_utilization to {most:g} or less, " if most >= 0.05 and fits else ""
    lower = lower or "take less of the device (`mmrl plan CONFIG` proposes settings), "
    ours = " ".join(str(each.pid) for each in who if each.is_ours)
    end = "end them, " if who else ""
    end = f"end them (kill {ours}), " if ours else end
    return ResourceError(
        f"a GPU of {host} has {free / 1e9:.1f} GB free of {total / 1e9:.1f} GB, and {needed / 1e9:.1f} GB are needed: "
        f"{(needed - free) / 1e9:.1f} GB are missing",
        where="; ".join(map(str, who))
        or "nvidia-smi names no process that holds the rest: it may be in another container, or one that is ending",
        remedy=f"{end}{lower}or choose another GPU with CUDA_VISIBLE_DEVICES",
    )
