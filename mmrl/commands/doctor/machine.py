"""The machine: GPUs, processors, memory, shared memory, ports, folders and the tools that compile."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mmrl.commands.doctor.finding import Finding, Status, gibibytes
from mmrl.commands.doctor.probe import GPU, Probe
from mmrl.config.cluster import ClusterConfig
from mmrl.engine.machine.build_tools import HEADER, BuildTools

GIB = 2**30
MIN_SHARED_BYTES = GIB
"""Ray keeps objects in shared memory and NCCL its buffers; a container's default of 64 MiB is too little for both."""
MIN_DISK_BYTES = 10 * GIB
BUSY_BYTES = GIB
"""More than a process's own CUDA context takes of a GPU."""


def gpu_findings(probe: Probe, driver: str) -> Iterator[Finding]:
    """The kind of device, and each GPU."""
    found = f"{len(probe.gpus)} GPU(s), driver {driver or 'unknown'}" if probe.gpus else "no GPU, training on the CPU"
    found += f" ({probe.cuda_error})" if probe.cuda_error else ""
    yield Finding("devices", "kind", "ok", f"{probe.kind}: {found}; {probe.threads} torch threads")
    for index, gpu in enumerate(probe.gpus):
        yield _gpu(index, gpu)


def _gpu(index: int, gpu: GPU) -> Finding:
    if gpu.error:
        remedy = "end the processes that hold it, or reset it; CUDA_VISIBLE_DEVICES can leave it out"
        return Finding("devices", f"gpu {index}", "bad", gpu.error, remedy)
    used = gpu.total_bytes - gpu.free_bytes
    found = (
        f"{gpu.name}, {gibibytes(gpu.free_bytes)} free of {gibibytes(gpu.total_bytes)}, "
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]}, {'bf16' if gpu.bf16 else 'no bf16'}"
    )
    if not gpu.bf16:
        remedy = "set model.dtype: float32; bf16 and variable-length attention need compute capability 8.0"
        return Finding("devices", f"gpu {index}", "warn", found, remedy)
    if used > BUSY_BYTES:
        remedy = f"other processes hold about {gibibytes(used)}: end them, or lower sampler.gpu_memory_utilization"
        return Finding("devices", f"gpu {index}", "warn", found, remedy)
    return Finding("devices", f"gpu {index}", "ok", found)


def control_groups(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The folders of this process's control group (version 2) and of those around it, where a container is limited."""
    path = next((line[3:] for line in _text(own).splitlines() if line.startswith("0::")), "")
    innermost = mount / path.strip("/")
    return [folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(mount)]


def processor_quota(groups: Sequence[Path]) -> float | None:
    """Processors' worth of time that the tightest group gets; None without a limit."""
    pairs = [_text(group / "cpu.max").split() for group in groups]
    return min((int(pair[0]) / int(pair[1]) for pair in pairs if pair and pair[0].isdigit()), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def processor_findings(environ: Mapping[str, str], groups: Sequence[Path]) -> Iterator[Finding]:
    """Processors and memory that this process may use; a container's limits count."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = processor_quota(groups)
    threads = environ.get("OMP_NUM_THREADS", "not set")
    found = f"{usable} of {os.cpu_count()} usable" + (f", quota {quota:g}" if quota else "")
    crowded = quota is not None and threads == "not set" and quota < usable
    remedy = "set OMP_NUM_THREADS to the quota: torch starts a thread for every processor it sees" if crowded else ""
    found += f"; OMP_NUM_THREADS {threads}"
    yield Finding("machine", "processors", "warn" if crowded else "ok", found, remedy)
    total, available = memory_bytes(groups)
    yield Finding("machine", "memory", "ok", f"{gibibytes(available)} available of {gibibytes(total)}")


def memory_bytes(groups: Sequence[Path], meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """(total, available) main memory of the tightest control group, or of the machine where that is less."""
    rows = dict(line.split(":", 1) for line in _text(meminfo).splitlines())
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    total, available = (int(rows.get(key, str(physical)).split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    pairs = [(_text(group / "memory.max"), _text(group / "memory.current")) for group in groups]
    limits = ((int(limit), int(used)) for limit, used in pairs if limit.isdigit() and used.isdigit())
    limit, used = min(limits, default=(total, 0))
    return min(limit, total), max(min(available, limit - used), 0)


def shared_memory_finding(folder: Path = Path("/dev/shm")) -> Finding:
    """Room in shared memory."""
    if not folder.is_dir():
        return Finding("machine", "shared memory", "ok", f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{gibibytes(usage.free)} free of {gibibytes(usage.total)} in {folder}"
    if usage.free < MIN_SHARED_BYTES:
        remedy = "Ray and NCCL need it: clear it, or give the container more (docker run --shm-size=8g, or --ipc=host)"
        return Finding("machine", "shared memory", "warn", found, remedy)
    return Finding("machine", "shared memory", "ok", found)


def port_findings(*, joins_cluster: bool) -> Iterator[Finding]:
    """Open and reach ports, on loopback and on the address that other nodes see."""
    severity: Status = "bad" if joins_cluster else "warn"
    yield _port("loopback", "127.0.0.1", "bad")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        remedy = "add the host's name to /etc/hosts"
        yield Finding("machine", "host name", severity, f"does not resolve: {error}", remedy)
        return
    if not address.startswith("127."):
        yield Finding("machine", "host name", "ok", "resolves to an address of its own")
        yield _port("host address", address, severity)
    elif joins_cluster:
        remedy = "other nodes cannot reach it: give the name its address in /etc/hosts"
        yield Finding("machine", "host name", "warn", "resolves to loopback", remedy)
    else:
        yield Finding("machine", "host name", "ok", "resolves to loopback, enough for one node")


def _port(name: str, address: str, severity: Status, count: int = 4) -> Finding:
    """Open ``count`` free ports at once and connect to each."""
    try:
        with ExitStack() as stack:
            for _ in range(count):
                server = stack.enter_context(socket.create_server((address, 0)))
                stack.enter_context(socket.create_connection(server.getsockname()[:2], timeout=5))
    except OSError as error:
        remedy = "look at firewall, proxy and the host's name: ranks and Ray meet on such ports"
        return Finding("machine", f"ports, {name}", severity, str(error), remedy)
    return Finding("machine", f"ports, {name}", "ok", f"{count} free ones opened and reached")


def compiler_findings(tools: BuildTools, kind: str) -> Iterator[Finding]:
    """The C compiler and Python's headers, which Triton needs on a GPU; on a CPU nothing is compiled."""
    if kind != "cuda":
        return
    remedy = "" if tools.compiler else tools.compiler_remedy
    yield Finding("machine", "C compiler", "bad" if remedy else "ok", tools.compiler or "not found", remedy)
    where = tools.include / HEADER
    if tools.has_header:
        yield Finding("machine", "Python's headers", "ok", f"{where}")
    else:
        yield Finding("machine", "Python's headers", "bad", f"{where} is missing", tools.header_remedy)


def folder_findings(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Room in each folder, or in the one that it would be created in, and if it can be written."""
    for name, folder in folders.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))
        free = shutil.disk_usage(there).free
        found = f"{folder}: {gibibytes(free)} free"
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            remedy = "choose a folder that this user may write to"
            yield Finding("machine", name, "bad", f"{found}, not writable: {error.strerror}", remedy)
            continue
        low = free < MIN_DISK_BYTES
        remedy = "free some: models and checkpoints take gigabytes" if low else ""
        yield Finding("machine", name, "warn" if low else "ok", found, remedy)


def used_folders(environ: Mapping[str, str], run_dir: str) -> dict[str, Path]:
    """Folders that runs write to: the run's, the hub's cache, temporary files."""
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return {
        "run folder": Path(run_dir).expanduser(),
        "hub cache": Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser(),
        "temporary files": Path(tempfile.gettempdir()),
    }


def machine_findings(
    probe: Probe, environ: Mapping[str, str], run_dir: str, cluster: ClusterConfig, driver: str
) -> Sequence[Finding]:
    """All findings of this module."""
    return [
        *gpu_findings(probe, driver),
        *processor_findings(environ, control_groups()),
        shared_memory_finding(),
        *port_findings(joins_cluster=cluster.name == "ray" and cluster.address is not None),
        *compiler_findings(BuildTools.here(environ), probe.kind),
        *folder_findings(used_folders(environ, run_dir)),
    ]
