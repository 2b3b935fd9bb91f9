"""What torch says of itself and of the devices, asked in a process of its own: importing it may fail, or abort."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.engine.device import DeviceKind, detect

_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class GPU:
    """One device that torch sees.

    Attributes:
        free_bytes: What no process holds.
        capability: Compute capability, such as (9, 0).
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    bf16: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """What torch says.

    Attributes:
        error: Why torch cannot be imported; empty if it can, and then the rest is filled.
        cuda: The CUDA version that torch is built for; empty for a CPU build.
        cuda_error: Why no GPU can be used, in torch's words; empty if one can, or for a CPU build.
        torchvision_error: Why torchvision cannot be imported; empty if it can.
    """

    error: str
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    kind: DeviceKind = "cpu"
    cuda_error: str = ""
    torchvision_error: str = ""
    threads: int = 0
    gpus: tuple[GPU, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Probe:
        """The inverse of ``dataclasses.asdict``, through JSON."""
        gpus = tuple(GPU(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values["gpus"])
        return cls(**{**values, "gpus": gpus})


def probe() -> Probe:
    """Ask a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "mmrl.doctor.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Probe(f"no answer within {_TIMEOUT_S} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Probe(f"exit status {done.returncode}: {last_line(done.stderr)}")
    return Probe.of(json.loads(lines[-1]))


def last_line(text: str) -> str:
    """The last line with anything on it: the message of a traceback."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def _look() -> Probe:
    import torch

    kind = detect()
    return Probe(
        error="",
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else "",
        kind=kind,
        cuda_error=_cuda_error() if torch.version.cuda and kind == "cpu" else "",
        torchvision_error=_torchvision_error(),
        threads=torch.get_num_threads(),
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())) if kind == "cuda" else (),
    )


def _cuda_error() -> str:
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return last_line(str(error).partition("\n")[0])
    return "torch finds no device"


def _torchvision_error() -> str:
    try:
        __import__("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _gpu(index: int) -> GPU:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return GPU(properties.name, total, free, (properties.major, properties.minor), bf16)


if __name__ == "__main__":
    print(json.dumps(asdict(_look())))
