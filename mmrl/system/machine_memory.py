"""Memory of this machine that its processes may use."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Bytes of the machine's memory, or of the container's or the batch job's that this process belongs to."""
    return min(int(psutil.virtual_memory().total), *_limits(), 2**63)


def _limits() -> list[int]:
    """Limits of this process's control groups, of either version."""
    try:
        groups = OWN.read_text().splitlines()
    except OSError:
        return []
    found = list[int]()
    for _, controllers, place in (line.split(":", 2) for line in groups):
        root, name = (CGROUPS, "memory.max") if not controllers else (CGROUPS / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        here = root / place.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(root) and (limit := _number(folder / name)) is not None:
                found.append(limit)
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None if it has none, or there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
