"""NVIDIA's driver: its version, its GPUs for this process, and the reason why torch does not use them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import ResourceError

OLDEST = {11: 450, 12: 525, 13: 580}
"""The oldest driver of each major version of CUDA (CUDA's release notes, "CUDA minor version compatibility")."""

NO_DEVICES = "No devices were found"
"""The words of ``nvidia-smi`` if a driver is loaded and this process may use none of its GPUs."""

DEVICES = Path("/dev")
LOADED = Path("/proc/driver/nvidia/version")
"""The kernel's file with the version of the loaded driver; containers without a GPU can read it too."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver according to ``nvidia-smi``, or to the kernel without that command.

    Attributes:
        version: Empty if it is not known, or no driver is loaded.
        error: The output of ``nvidia-smi`` where it fails.
        opens: True if the device file of a GPU can be opened.
    """

    version: str = ""
    error: str = ""
    opens: bool = False

    @classmethod
    def here(cls) -> Driver:
        """This machine's driver."""
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
        """True if there is a GPU that this process may use."""
        return bool(self.version or self.opens) and NO_DEVICES not in self.error

    def is_older_than(self, needed: int) -> bool:
        """True if its version is known, and below a major version."""
        major = self.version.partition(".")[0]
        return major.isdigit() and int(major) < needed


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """Facts that tell a GPU that torch cannot use from a machine without one.

    Attributes:
        torch: torch's version.
        cuda: The CUDA version that torch is built for; empty for a CPU build.
        error: torch's own words on why it finds no GPU; empty if they are not known.
        visible: The environment variable CUDA_VISIBLE_DEVICES; None if it is not set.
    """

    torch: str
    cuda: str
    error: str
    visible: str | None
    driver: Driver

    @classmethod
    def here(cls) -> CudaFacts:
        """The facts of this process, in which torch finds no GPU."""
        import torch

        visible, driver = os.environ.get("CUDA_VISIBLE_DEVICES"), Driver()
        error = ""
        if not hides_gpus(visible):
            driver = Driver.here()
        if driver.has_gpu and torch.version.cuda:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as problem:
                error = str(problem).partition("\n")[0]
        return cls(torch.__version__, torch.version.cuda or "", error, visible, driver)


def hides_gpus(visible: str | None) -> bool:
    """True if CUDA_VISIBLE_DEVICES says that no GPU is wanted; Slurm's word for it is ``NoDevFiles``."""
    return visible is not None and visible.strip() in ("", "-1", "NoDevFiles")


def unused_gpu(facts: CudaFacts) -> ResourceError | None:
    """An error if torch uses no GPU although there is one and nobody asked for a CPU; None if all is well."""
    driver = facts.driver
    if hides_gpus(facts.visible) or not driver.has_gpu:
        return None
    build = f"torch {facts.torch}, built for " + (f"CUDA {facts.cuda}" if facts.cuda else "CPUs")
    where = f"NVIDIA's driver {driver.version or 'of unknown version'}; {build}"
    on_cpu = "to train on the CPU all the same, set CUDA_VISIBLE_DEVICES to nothing (CUDA_VISIBLE_DEVICES= mmrl ...)"
    if not facts.cuda:
        return ResourceError(
            "there is an NVIDIA GPU, and the installed torch is built without CUDA",
            where=where,
            remedy=f"install mmrl-train[gpu] in a new environment; {on_cpu}",
        )
    needed = oldest_driver(facts.cuda)
    if needed is not None and driver.is_older_than(needed):
        return ResourceError(
            f"NVIDIA's driver {driver.version} is too old for CUDA {facts.cuda}",
            where=where,
            possible=f"a driver from {needed} on",
            remedy=f"update the driver, or install a torch that is built for an older CUDA; {on_cpu}",
        )
    reasons = [facts.error or "torch does not say why", driver.error and f"nvidia-smi fails: {driver.error}"]
    listed = "" if facts.visible is None else f"; CUDA_VISIBLE_DEVICES={facts.visible}"
    return ResourceError(
        f"there is an NVIDIA GPU, and torch finds none: {'; '.join(filter(None, reasons))}",
        where=where + listed,
        possible="" if needed is None else f"a driver from {needed} on",
        remedy=f"repair the driver (nvidia-smi must work), and look at CUDA_VISIBLE_DEVICES; {on_cpu}",
    )


def oldest_driver(cuda: str) -> int | None:
    """The major version of the oldest driver for a version of CUDA such as ``13.0``; None if it is not known."""
    major = cuda.partition(".")[0]
    return OLDEST.get(int(major)) if major.isdigit() else None


def loaded_version(text: str) -> str:
    """The version in the kernel's own account of the loaded driver; empty if there is none."""
    found = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return found[0] if found else ""


def _opens(path: Path) -> bool:
    """True if this process may use the device. A control group can forbid what the file's permissions allow."""
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
