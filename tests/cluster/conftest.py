"""Runs on real Ray clusters, and the processes that they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Household:
    """Commands whose descendants can all be found again, by a mark in their environment."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "MMRL_TEST_MARK": self.mark, "RAY_AUTH_MODE": "disabled"}

    def run(self, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """``mmrl`` with these arguments, to its end."""
        return self.call("-m", "mmrl", *arguments, folder=folder, **environment)

    def call(self, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, to its end."""
        command, env = [sys.executable, *arguments], self.environment | environment
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self.environment, **options)

    def members(self) -> dict[int, str]:
        """Process id and command of every descendant that is alive."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def members_after(self, seconds: float) -> dict[int, str]:
        """The same, when none is left or the time is over."""
        deadline = time.monotonic() + seconds
        while (found := self.members()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def kill(self) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def household() -> Iterator[Household]:
    household = Household()
    yield household
    household.kill()
