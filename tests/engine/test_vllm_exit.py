"""A process ends while vLLM sleeps; its exit functions abort here, as they may on a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmrl.engine.sampler import vllm_exit

PROGRAM = """\
import atexit, os, sys, weakref
from types import ModuleType, SimpleNamespace

class Client:
    def __init__(self, core):
        self._finalizer = weakref.finalize(self, core.shutdown)

class Pool:
    def __del__(self):
        os.abort()  # as when it outlives its allocator

class CuMemAllocator:
    instance = None
    def __init__(self):
        self.allocator_and_pools = {"weights": [(Pool(), object())], "kv_cache": [(Pool(), object())]}
    @staticmethod
    def shutdown():
        if CuMemAllocator.instance.allocator_and_pools:
            os.abort()

class Tensor:
    def __del__(self):
        print("CUDA Error: invalid argument", file=sys.stderr)

module = ModuleType("vllm.device_allocator.cumem")
module.CuMemAllocator, CuMemAllocator.instance = CuMemAllocator, CuMemAllocator()
atexit.register(CuMemAllocator.shutdown)
sys.modules[module.__name__] = module
core = SimpleNamespace(shutdown=os.abort, model=[Tensor()])
llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=Client(core), core=core, is_sleeping=lambda: SLEEPS))
del core, module

from mmrl.engine.sampler import vllm_exit
from mmrl.engine.sampler.vllm_sampler import VLLMSampler

vllm_exit._leave_groups = lambda: print("left")
sampler = VLLMSampler.__new__(VLLMSampler)
sampler._sleep_level, sampler._llm = 1, llm
del llm
sampler.close()
del sampler
"""


@pytest.mark.parametrize("sleeps", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_process_whose_vllm_sleeps_ends_without_a_word(sleeps):
    program = PROGRAM.replace("SLEEPS", str(sleeps))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if sleeps:
        assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
    else:
        assert done.returncode < 0 and done.stdout == ""


def test_vllm_has_what_is_taken_from_it():
    """The finalizer's name, the pools by tag, and an exit function that does nothing without pools."""
    (folder,) = find_spec("vllm").submodule_search_locations
    client = (Path(folder) / "v1/engine/core_client.py").read_text()
    assert "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)" in client
    allocator = Path(folder, *vllm_exit.ALLOCATOR.split(".")[1:]).with_suffix(".py").read_text()
    assert "atexit.register(CuMemAllocator._shutdown_singleton)" in allocator
    assert 'instance: "CuMemAllocator | None" = None' in allocator
    assert "self.allocator_and_pools: dict[str, list[Any]] = {}" in allocator
    assert "if not self.allocator_and_pools:\n            return" in allocator
