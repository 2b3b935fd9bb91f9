"""Limits that a container or a batch system puts on this process: Linux control groups, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class ControlGroups:
    """The groups that this process is in, with all that enclose them.

    Args:
        mount: Where the groups' files are.
        own: Lists this process's groups, a line each: ``number:controllers:path``; version 2 has one, ``0::path``.
    """

    def __init__(self, mount: Path = MOUNT, own: Path = OWN) -> None:
        self._mount, self._paths = mount, {"": "", "memory": "", "cpu": ""}
        with suppress(OSError):
            for line in own.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                self._paths.update(dict.fromkeys(controllers.split(","), path))

    def memory_bytes(self) -> tuple[int, int] | None:
        """(limit, used) of the tightest group; None without a limit."""
        files = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
        found = [
            (int(limit), int(used))
            for controller, limit_file, used_file in files
            for folder in self._folders(controller)
            if (limit := _text(folder / limit_file)).isdigit() and (used := _text(folder / used_file)).isdigit()
        ]
        return min(found, default=None)

    def processors(self) -> float | None:
        """Processors' worth of time that the tightest group gets; None without a limit."""
        pairs = [_text(folder / "cpu.max").split() for folder in self._folders("")]
        pairs += [
            [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")] for folder in self._folders("cpu")
        ]
        return min(
            (int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0].isdigit()), default=None
        )

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and those above it; inside a container the path may not be there, but the top is."""
        top = self._mount / controller
        innermost = top / self._paths[controller].strip("/")
        yield from (folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(top))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
