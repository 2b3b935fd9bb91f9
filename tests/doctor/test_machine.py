"""Devices, memory, files, ports, folders and tools, from inputs as machines have them."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.doctor import machine
from mmrl.doctor.cgroup import ControlGroups
from mmrl.doctor.probe import GPU, Probe

GIB = 2**30
NO_GROUPS = ControlGroups(Path("/nowhere"), Path("/nowhere"))
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


def test_without_a_gpu_the_cpu_is_named():
    (row,) = machine.gpu_findings(Probe("", threads=2), "")
    assert row.found == "cpu: no GPU, training on the CPU; 2 torch threads"


def test_memory_is_the_machines_or_the_groups_where_that_is_less(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    assert machine.memory_bytes(NO_GROUPS, meminfo) == (16 * GIB, 8 * GIB)
    for limit, used, expected in [(4, 1, (4, 3)), (64, 1, (16, 8)), (12, 2, (12, 8)), (4, 5, (4, 0))]:
        groups = SimpleNamespace(memory_bytes=lambda limit=limit, used=used: (limit * GIB, used * GIB))
        assert machine.memory_bytes(groups, meminfo) == (expected[0] * GIB, expected[1] * GIB)


def test_a_quota_below_the_visible_processors_asks_for_a_number_of_threads():
    groups = SimpleNamespace(processors=lambda: 0.5, memory_bytes=lambda: None)
    processors, memory = machine.processor_findings({}, groups)
    assert processors.status == "warn" and "quota 0.5" in processors.found and "OMP_NUM_THREADS" in processors.remedy
    assert next(iter(machine.processor_findings({"OMP_NUM_THREADS": "1"}, groups))).status == "ok"
    assert next(iter(machine.processor_findings({}, NO_GROUPS))).status == "ok"
    assert "available of" in memory.found


@pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "warn"), (2 * GIB, "ok")])
def test_little_shared_memory_is_a_warning(free, status, monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=2 * GIB))
    row = machine.shared_memory_finding(tmp_path)
    assert row.status == status and ("--shm-size" in row.remedy) == (status == "warn")
    assert machine.shared_memory_finding(tmp_path / "none").status == "ok"


@pytest.mark.parametrize(
    ("limits", "uses_ray", "status"),
    [
        ((1024, 4096), False, "ok"), ((1024, 4096), True, "warn"), ((256, 256), False, "warn"),
        ((-1, -1), True, "ok"), ((65536, 65536), True, "ok"),
    ],
)  # fmt: skip
def test_ray_needs_more_open_files(limits, uses_ray, status):
    assert machine.open_files_finding(limits, uses_ray=uses_ray).status == status


def test_ports_are_really_opened_on_loopback():
    rows = list(machine.port_findings(uses_ray=False))
    assert (rows[0].check, rows[0].status) == ("ports, loopback", "ok")


@pytest.mark.parametrize(
    ("address", "uses_ray", "expected"),
    [
        ("127.0.1.1", False, [("host name", "ok")]),
        ("127.0.1.1", True, [("host name", "warn")]),
        ("192.0.2.1", True, [("host name", "ok"), ("ports, host address", "bad")]),
        ("192.0.2.1", False, [("host name", "ok"), ("ports, host address", "warn")]),
        (None, True, [("host name", "bad")]),
        (None, False, [("host name", "warn")]),
    ],
)
def test_the_hosts_own_name_and_address_matter_most_to_ray(address, uses_ray, expected, monkeypatch):
    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(machine.socket, "gethostbyname", resolve)
    rows = list(machine.port_findings(uses_ray=uses_ray))[1:]
    assert [(row.check, row.status) for row in rows] == expected
    assert not any(socket.gethostname() in row.found for row in rows)


@pytest.fixture
def on_path(monkeypatch) -> set[str]:
    """The commands that are on the PATH."""
    commands: set[str] = set()
    monkeypatch.setattr(machine.shutil, "which", lambda command: command if command in commands else None)
    return commands


@pytest.mark.parametrize(
    ("environ", "kind", "expected"),
    [
        ({}, "cpu", {"C++ compiler": "c++", "ninja": "not found"}),
        ({"CXX": "ccache g++"}, "cpu", {"C++ compiler": "ccache", "ninja": "not found"}),
        ({"CXX": "icpx"}, "cpu", {"C++ compiler": "not found", "ninja": "not found"}),
        ({}, "cuda", {"C compiler": "clang"}),
        ({"CC": "icx"}, "cuda", {"C compiler": "not found"}),
    ],
)
def test_tools_that_compile_are_looked_for_by_device(environ, kind, expected, on_path):
    on_path |= {"c++", "clang", "ccache"}
    rows = list(machine.compiler_findings(environ, kind))
    assert {row.check: row.found for row in rows} == expected
    assert all((row.status == "bad") == (row.found == "not found") == bool(row.remedy) for row in rows)


def test_a_tool_of_an_environment_that_is_not_active_is_said_to_be_there(on_path, monkeypatch, tmp_path):
    (tmp_path / "ninja").touch()
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "python"))
    *_, ninja = machine.compiler_findings({}, "cpu")
    assert ninja.remedy == f"activate the environment, which has it: {tmp_path} is not on the PATH"


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
