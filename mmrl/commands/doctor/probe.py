"""Facts about torch and the devices, from a process of its own: importing torch may fail, or abort."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmrl.engine.device import DeviceKind, detect
from mmrl.errors import first_line

_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class GPU:
    """One device that torch sees.

    Attributes:
        free_bytes: Bytes that no process holds.
        capability: Compute capability, such as (9, 0).
        error: Why it cannot be used, in torch's words; then nothing else is known.
    """

    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts about torch and its devices.

    Attributes:
        error: Why torch cannot be imported; empty if it can, and then the rest is filled.
        cuda: The CUDA version that torch is built for; empty for a CPU build.
        cuda_error: Why no GPU can be used, or asked for; empty if one can, or for a CPU build.
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
    """Ask a fresh process, which answers when it has imported torch, and again when it knows more."""
    command = [sys.executable, "-W", "ignore", "-m", "mmrl.commands.doctor.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Probe(f"no answer within {_TIMEOUT_S} s")
    answers = [answer for line in done.stdout.splitlines() if (answer := _answer(line))]
    failed = f"exit status {done.returncode}: {last_line(done.stderr)}" if done.returncode else ""
    if not answers:
        return Probe(failed or "no answer")
    return replace(answers[-1], cuda_error=failed) if failed else answers[-1]


def _answer(line: str) -> Probe | None:
    """The probe in a line of output; None if ``_look`` has not written it."""
    try:
        return Probe.of(json.loads(line))
    except (ValueError, TypeError, KeyError):
        return None


def last_line(text: str) -> str:
    """The last line that is not empty: the message of a traceback."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def _look() -> Iterator[Probe]:
    import torch

    found = Probe("", torch=torch.__version__, cuda=torch.version.cuda or "", threads=torch.get_num_threads())
    yield found
    found = replace(found, torchvision_error=_torchvision_error())
    yield found
    try:
        if detect() == "cuda":
            gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            yield replace(found, kind="cuda", gpus=gpus, nccl=nccl)
        elif found.cuda:
            torch.cuda.init()
            yield replace(found, cuda_error="torch finds no device")
    except Exception as error:  # drivers raise many types
        yield replace(found, cuda_error=first_line(error))


def _torchvision_error() -> str:
    try:
        __import__("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _gpu(index: int) -> GPU:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except Exception as error:
        return GPU(error=first_line(error))
    return GPU(properties.name, total, free, (properties.major, properties.minor), bf16)


if __name__ == "__main__":
    for known in _look():
        print(json.dumps(asdict(known)), flush=True)
