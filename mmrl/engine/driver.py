"""NVIDIA's driver: which one is here, whether it has a GPU for this process, and which one a build of CUDA needs."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

OLDEST = {11: 450, 12: 525, 13: 580}
"""The oldest driver of each major version of CUDA (CUDA's release notes, "CUDA minor version compatibility")."""

NO_DEVICES = "No devices were found"
"""What ``nvidia-smi`` says if a driver is loaded and this process may use none of its GPUs."""

DEVICES = Path("/dev")
LOADED = Path("/proc/driver/nvidia/version")
"""Where the kernel tells the version of the loaded driver, to containers without a GPU too."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, as ``nvidia-smi`` tells it, or without that command the kernel.

    Attributes:
        version: Empty if it is not known, or none is loaded.
        error: What ``nvidia-smi`` says where it fails.
        opens: Whether the device file of a GPU can be opened.
    """

    version: str = ""
    error: str = ""
    opens: bool = False

    @classmethod
    def here(cls) -> Driver:
        """That of this machine."""
        opens = any(map(_opens, DEVICES.glob("nvidia[0-9]*")))
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        loaded = loaded_version(_text(LOADED)) if opens else ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except FileNotFoundError:
            return cls(loaded, opens=opens)
        except (OSError, subprocess.TimeoutExpired) as error:
            return cls(loaded, str(error), opens)
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())
            return cls(loaded, said or f"exit status {done.returncode}", opens)
        return cls(done.stdout.strip().partition("\n")[0], opens=opens)

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU that this process may use."""
        return bool(self.version or self.opens) and NO_DEVICES not in self.error

    def is_older_than(self, needed: int) -> bool:
        """Whether its version is known, and below a major version."""
        major = self.version.partition(".")[0]
        return major.isdigit() and int(major) < needed


def oldest_driver(cuda: str) -> int | None:
    """The major version of the oldest driver for a version of CUDA such as ``13.0``; None if it is not known."""
    major = cuda.partition(".")[0]
    return OLDEST.get(int(major)) if major.isdigit() else None


def loaded_version(text: str) -> str:
    """The version in the kernel's own account of the loaded driver; empty if there is none."""
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return found[0] if found else ""


def _opens(path: Path) -> bool:
    """Whether this process may use the device: a control group can forbid what the file's permissions allow."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
