"""Devices, memory, ports, folders and tools, from inputs as machines have them."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.commands.doctor import machine
from mmrl.commands.doctor.probe import GPU, Probe
from mmrl.engine.machine import build_tools
from mmrl.engine.machine.build_tools import BuildTools

GIB = 2**30
H200 = GPU("NVIDIA H200", 140 * GIB, 139 * GIB + GIB // 2, (9, 0), bf16=True)


@pytest.mark.parametrize(
    ("gpu", "status", "remedy"),
    [
        (H200, "ok", ""),
        (GPU("NVIDIA H200", 140 * GIB, 40 * GIB, (9, 0), bf16=True), "warn", "other processes hold about 100.0 GiB"),
        (GPU("Tesla V100", 32 * GIB, 32 * GIB, (7, 0), bf16=False), "warn", "set model.dtype: float32"),
    ],
)
def test_a_gpu_is_described_and_judged(gpu, status, remedy):
    kind, row = machine.gpu_findings(Probe("", kind="cuda", threads=8, gpus=(gpu,)), "580.1")
    assert kind.found == "cuda: 1 GPU(s), driver 580.1; 8 torch threads"
    assert gpu.name in row.found and f"compute capability {gpu.capability[0]}.0" in row.found
    assert row.status == status and row.remedy.startswith(remedy) and bool(row.remedy) == bool(remedy)


def test_without_a_gpu_the_cpu_is_named_and_what_torch_says_of_it():
    (row,) = machine.gpu_findings(Probe("", threads=2), "")
    assert row.found == "cpu: no GPU, training on the CPU; 2 torch threads"
    (row,) = machine.gpu_findings(Probe("", cuda="13.0", cuda_error="driver too old", threads=2), "")
    assert row.found == "cpu: no GPU, training on the CPU (driver too old); 2 torch threads"


def test_a_gpu_that_cannot_be_asked_is_bad_and_the_others_are_judged():
    faulty = GPU(error="CUDA error: out of memory")
    _, first, second = machine.gpu_findings(Probe("", kind="cuda", gpus=(faulty, H200)), "580.1")
    assert (first.check, first.status, first.found) == ("gpu 0", "bad", "CUDA error: out of memory")
    assert (second.check, second.status) == ("gpu 1", "ok")


def group(folder: Path, cpu: str = "max 100000", memory: str = "max", used: int = 0) -> Path:
    """A control group's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"cpu.max": cpu, "memory.max": memory, "memory.current": used}.items():
        (folder / name).write_text(f"{value}\n")
    return folder


def test_memory_is_the_machines_or_the_groups_where_that_is_less(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    assert machine.memory_bytes([], meminfo) == (16 * GIB, 8 * GIB)
    for limit, used, expected in [(4, 1, (4, 3)), (64, 1, (16, 8)), (12, 2, (12, 8)), (4, 5, (4, 0))]:
        groups = [group(tmp_path / "job", memory=str(limit * GIB), used=used * GIB), group(tmp_path / "top")]
        assert machine.memory_bytes(groups, meminfo) == (expected[0] * GIB, expected[1] * GIB)
    total, available = machine.memory_bytes([], tmp_path / "none")
    assert total == available > GIB / 4


@pytest.mark.parametrize("own", ["0::/job/step", "4:memory:/x\n0::/job/step\n"])
def test_of_nested_control_groups_the_tightest_counts(own, tmp_path):
    (tmp_path / "own").write_text(own)
    mount = tmp_path / "mount"
    group(mount / "job/step")
    group(mount / "job", cpu="150000 100000")
    groups = machine.control_groups(mount, tmp_path / "own")
    assert groups == [mount / "job/step", mount / "job", mount]
    assert machine.processor_quota(groups) == 1.5
    group(mount, cpu="50000 100000")  # inside a container the limits are at the top
    assert machine.processor_quota(groups) == 0.5
    assert machine.processor_quota(machine.control_groups(tmp_path / "none", tmp_path / "none")) is None


def test_a_quota_below_the_visible_processors_asks_for_a_number_of_threads(tmp_path):
    groups = [group(tmp_path, cpu="50000 100000")]
    processors, memory = machine.processor_findings({}, groups)
    assert processors.status == "warn" and "quota 0.5" in processors.found and "OMP_NUM_THREADS" in processors.remedy
    assert next(iter(machine.processor_findings({"OMP_NUM_THREADS": "1"}, groups))).status == "ok"
    assert next(iter(machine.processor_findings({}, []))).status == "ok"
    assert "available of" in memory.found


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "warn"), (2 * GIB, "ok")])
def test_little_shared_memory_is_a_warning(free, status, monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=2 * GIB))
    row = machine.shared_memory_finding(tmp_path)
    assert row.status == status and ("--shm-size" in row.remedy) == (status == "warn")
    assert machine.shared_memory_finding(tmp_path / "none").status == "ok"


def test_ports_are_really_opened_on_loopback():
    rows = list(machine.port_findings(joins_cluster=False))
    assert (rows[0].check, rows[0].status) == ("ports, loopback", "ok")


@pytest.mark.parametrize(
    ("address", "joins_cluster", "expected"),
    [
        ("127.0.1.1", False, [("host name", "ok")]),
        ("127.0.1.1", True, [("host name", "warn")]),
        ("192.0.2.1", True, [("host name", "ok"), ("ports, host address", "bad")]),
        ("192.0.2.1", False, [("host name", "ok"), ("ports, host address", "warn")]),
        (None, True, [("host name", "bad")]),
        (None, False, [("host name", "warn")]),
    ],
)
def test_the_hosts_own_name_and_address_matter_most_to_a_cluster(address, joins_cluster, expected, monkeypatch):
    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(machine.socket, "gethostbyname", resolve)
    rows = list(machine.port_findings(joins_cluster=joins_cluster))[1:]
    assert [(row.check, row.status) for row in rows] == expected
    assert not any(socket.gethostname() in row.found for row in rows)


@pytest.fixture
def on_path(monkeypatch) -> set[str]:
    """The commands that are on the PATH."""
    commands: set[str] = set()
    monkeypatch.setattr(build_tools.shutil, "which", lambda command: command if command in commands else None)
    return commands


@pytest.mark.parametrize(
    ("environ", "kind", "expected"),
    [
        ({"CC": "icx"}, "cpu", []),
        ({}, "cuda", ["clang"]),
        ({"CC": "ccache gcc"}, "cuda", ["ccache"]),
        ({"CC": "icx"}, "cuda", ["not found"]),
    ],
)
def test_tools_that_compile_are_looked_for_by_device(environ, kind, expected, on_path):
    on_path |= {"clang", "ccache"}
    rows = [row for row in machine.compiler_findings(BuildTools.here(environ), kind) if row.check == "C compiler"]
    assert [row.found for row in rows] == expected
    assert all((row.status == "bad") == (row.found == "not found") == bool(row.remedy) for row in rows)


def test_a_tool_of_an_environment_that_is_not_active_is_said_to_be_there(on_path, monkeypatch, tmp_path):
    (tmp_path / "gcc").touch()
    monkeypatch.setattr(build_tools.sys, "executable", str(tmp_path / "python"))
    row, _ = machine.compiler_findings(BuildTools.here({}), "cuda")
    assert row.remedy == f"activate the environment, which has it: {tmp_path} is not on the PATH"


def test_a_python_without_headers_is_bad_on_a_gpu_and_the_package_is_named(on_path, monkeypatch, tmp_path):
    on_path.add("gcc")
    monkeypatch.setattr(build_tools, "include_folder", lambda: tmp_path)
    monkeypatch.setattr(build_tools.sysconfig, "get_python_version", lambda: "3.12")
    _, row = machine.compiler_findings(BuildTools.here({}), "cuda")
    assert (row.check, row.status, row.found) == ("Python's headers", "bad", f"{tmp_path}/Python.h is missing")
    assert row.remedy.startswith("apt-get install python3.12-dev (dnf install python3.12-devel)")
    (tmp_path / "Python.h").touch()
    _, row = machine.compiler_findings(BuildTools.here({}), "cuda")
    assert (row.status, row.found, row.remedy) == ("ok", f"{tmp_path}/Python.h", "")


def test_folders_that_do_not_exist_yet_are_judged_by_what_encloses_them(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=20 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    (row,) = machine.folder_findings({"run folder": tmp_path / "a/b"})
    assert row.status == "ok" and row.found == f"{tmp_path}/a/b: 20.0 GiB free"
    assert not (tmp_path / "a").exists() and not list(tmp_path.iterdir())
    usage.free = 5 * GIB
    (row,) = machine.folder_findings({"run folder": tmp_path})
    assert row.status == "warn" and "checkpoints" in row.remedy


def test_a_folder_that_cannot_be_written_is_bad():
    (row,) = machine.folder_findings({"run folder": Path("/proc/runs")})
    assert row.status == "bad" and "not writable" in row.found


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({}, Path("~/.cache/huggingface/hub").expanduser()),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/huggingface/hub")),
        ({"HF_HOME": "/hf"}, Path("/hf/hub")),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/elsewhere"}, Path("/elsewhere")),
    ],
)
def test_the_hubs_cache_is_where_the_hub_puts_it(environ, cache):
    assert machine.used_folders(environ, "runs/x")["hub cache"] == cache
