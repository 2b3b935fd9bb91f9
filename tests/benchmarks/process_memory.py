"""Memory of a command and of all that it starts, as the kernel tells it (Linux), and when it writes checkpoints."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

INTERVAL_S = 1.0
"""Seconds between two looks: a process with 10 GB takes the kernel some 30 ms to add up."""
END_S = 10
"""Seconds for a command that is interrupted to end by itself."""
SMALL = 2**27
"""Resident bytes below which what a process shares is not looked up, but left out."""
RANK = "RayWorker"
"""In the command line of a rank's process."""


@dataclass
class Watched:
    """A command that has ended.

    Attributes:
        code: Its exit code.
        began: In seconds since 1970.
        seconds: From its start to its end.
        together: Most bytes of all its processes at one time. What they share counts once (PSS).
        private: Of all processes at one time, most bytes that the kernel could not take back: no mapped files.
        each: Most bytes of each process, under what it is: ``main``, ``rank``, ``other``.
        least_available: Of the machine's memory.
        checkpoints: Seconds that each checkpoint took to be written.
        course: At each look the seconds since the start, and the bytes of all processes and of the largest one.
    """

    code: int = 0
    began: float = 0.0
    seconds: float = 0.0
    together: int = 0
    private: int = 0
    each: dict[str, list[int]] = field(default_factory=dict)
    least_available: int = 2**63
    checkpoints: list[float] = field(default_factory=list)
    course: list[tuple[float, int, int]] = field(default_factory=list)


def watch(command: Sequence[str], log: Path, checkpoints: Path, environment: Mapping[str, str]) -> tuple[str, Watched]:
    """Run a command to its end; returns what it printed.

    Args:
        log: For what it prints as errors.
        checkpoints: A folder in which a hidden entry is a checkpoint that is being written.
    """
    start, done = time.perf_counter(), threading.Event()
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment))
    found = Watched(began=time.time())
    watcher = threading.Thread(target=_look, args=(process.pid, checkpoints, found, done), daemon=True)
    watcher.start()
    try:
        printed, _ = process.communicate()
    finally:
        done.set()
        watcher.join()
        if process.poll() is None:  # this process is to end, and so is the command
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()
    found.code, found.seconds = process.returncode, time.perf_counter() - start
    return printed, found


def _look(pid: int, checkpoints: Path, found: Watched, done: threading.Event) -> None:
    kinds: dict[int, str] = {}
    peaks: dict[int, int] = {}
    since: float | None = None
    while not done.wait(INTERVAL_S):
        is_writing = any(path.name.startswith(".") for path in _entries(checkpoints))
        if is_writing and since is None:
            since = time.perf_counter()
        elif since is not None and not is_writing:
            found.checkpoints.append(time.perf_counter() - since)
            since = None
        together = private = largest = 0
        for process, size, files in _tree(pid):
            together, private, largest = together + size, private + size - files, max(size, largest)
            peaks[process.pid] = max(size, peaks.get(process.pid, 0))
            if kinds.get(process.pid, "other") == "other":  # a Ray worker is named after it has begun
                kinds[process.pid] = _kind(process, pid)
        found.together, found.private = max(together, found.together), max(private, found.private)
        found.course.append((round(time.time() - found.began, 1), together, largest))
        found.least_available = min(found.least_available, psutil.virtual_memory().available)
    for number, size in peaks.items():
        found.each.setdefault(kinds[number], []).append(size)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _tree(pid: int) -> list[tuple[psutil.Process, int, int]]:
    """The processes that are there now, their bytes, and those of them that are mapped files."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
    found = []
    for process in processes:
        with suppress(psutil.Error, OSError):  # it may have ended
            found.append((process, *_sizes(process)))
    return found


def _sizes(process: psutil.Process) -> tuple[int, int]:
    memory = process.memory_info()
    if memory.rss < SMALL:
        return memory.rss - memory.shared, 0
    lines = [line.split() for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]]
    rollup = {words[0]: 1024 * int(words[1]) for words in lines}
    return rollup["Pss:"], rollup["Pss_File:"]


def _kind(process: psutil.Process, root: int) -> str:
    if process.pid == root:
        return "main"
    try:
        return "rank" if RANK in " ".join(process.cmdline()) else "other"
    except psutil.Error:
        return "other"
