"""Each error that vLLM, Triton, DeepSpeed, torch or CUDA raise at a start, in its own words, and its answer."""

from __future__ import annotations

import errno
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, ValidationError

from mmrl.engine.machine import start_errors
from mmrl.engine.machine.build_tools import BuildTools
from mmrl.engine.machine.start_errors import ROWS, known
from mmrl.errors import ConfigError, DeviceBusyError, MMRLError, NumericsError, ResourceError


def named(name: str, text: str, *bases: type[Exception]) -> Exception:
    """An error of a class of that name."""
    error: Exception = type(name, bases or (Exception,), {"__str__": lambda self: text})()
    return error


def invalid() -> ValidationError:
    class Settings(BaseModel):
        stage: int

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"stage": "many"})
    return caught.value


FREE = (
    "Free memory on device cuda:0 (12.01/79.1 GiB) on startup is less than desired GPU memory utilization (0.5, 39.55 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
PROFILING = "Error in memory profiling. Initial free memory 40.1 GiB, current free memory 61.5 GiB."
GCC = ["gcc", "/tmp/x/cuda_utils.c", "-O3", "-shared", "-fPIC", "-o", "/tmp/x/cuda_utils.so"]
CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call."
CASES = [
    (ValueError(FREE), DeviceBusyError, "nvidia-smi"),
    (AssertionError(PROFILING), DeviceBusyError, "nvidia-smi"),
    (AssertionError("Memory usage increased after sleeping."), DeviceBusyError, "nvidia-smi"),
    (ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"), ResourceError,
     "raise sampler.gpu_memory_utilization"),
    (ValueError("To serve at least one request with the model's max seq len (9000), (1.2 GiB KV cache is needed, which "
                "is larger than the available KV cache memory (0.5 GiB)."), ResourceError, "data.max_prompt_tokens"),
    (AssertionError("CuMem allocator can only be used for one instance per process."), ResourceError, "new process"),
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set "
                  "triton.knobs.build.impl."), ResourceError, "apt-get install gcc"),
    (named("InductorError", "CalledProcessError: Command '['gcc', ...]' returned non-zero exit status 1."),
     ResourceError, "python3.11-dev"),
    (named("InvalidCxxCompiler", "No working C++ compiler found in torch._inductor.config.cpp.cxx", RuntimeError),
     ResourceError, "apt-get install g++"),
    (named("PTXASError", "PTXAS error: Internal Triton PTX codegen error"), ResourceError, "TRITON_PTXAS_PATH"),
    (RuntimeError("Cannot find ptxas"), ResourceError, "install.sh"),
    (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), ResourceError, "LD_LIBRARY_PATH"),
    (subprocess.CalledProcessError(1, ["/sbin/ldconfig", "-p"]), ResourceError, "LD_LIBRARY_PATH"),
    (subprocess.CalledProcessError(1, GCC), ResourceError, "apt-get install python3.11-dev"),
    (named("MissingCUDAException", "CUDA_HOME does not exist, unable to compile CUDA op(s)"), ResourceError,
     "learner.deepspeed"),
    (RuntimeError("Error building extension 'cpu_adam'"), ResourceError, "learner.deepspeed"),
    (RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"), ResourceError,
     "VLLM_USE_FLASHINFER_SAMPLER=0"),
    (ModuleNotFoundError("No module named 'vllm.v1.worker.gpu.sample.logits_processor'"), ResourceError, "install.sh"),
    (ImportError("libcudart.so.13: cannot open shared object file: No such file or directory"), ResourceError,
     "install.sh"),
    (ValueError("Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
                "compute capability 7.5."), ConfigError, "model.dtype: float32"),
    (RuntimeError(CUDA.format("no kernel image is available for execution on the device")), ResourceError, "driver"),
    (RuntimeError(CUDA.format("the provided PTX was compiled with an unsupported toolchain")), ResourceError, "driver"),
    (RuntimeError(CUDA.format("CUDA-capable device(s) is/are busy or unavailable")), DeviceBusyError, "nvidia-smi"),
    (RuntimeError(CUDA.format("uncorrectable ECC error encountered")), DeviceBusyError, "CUDA_VISIBLE_DEVICES"),
    (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, ncclSystemError: no interface found"),
     ResourceError, "NCCL_SOCKET_IFNAME"),
    (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error\nLast error:\n"
                                        "Error while creating shared memory segment /dev/shm/nccl-x"),
     ResourceError, "--shm-size"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/root/.cache/vllm"), ResourceError, "VLLM_CACHE_ROOT"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/.triton"), ResourceError, "TRITON_CACHE_DIR"),
    (invalid(), ConfigError, "sampler.engine"),
    (named("ZeRORuntimeException", "You are using ZeRO-Offload with a client provided optimizer"), ConfigError,
     "learner.deepspeed"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "kind", "remedy"), CASES, ids=[f"{type(each[0]).__name__}" for each in CASES])
def test_an_error_of_a_start_has_an_answer(error, kind, remedy, monkeypatch, caplog):
    missing = BuildTools(("gcc", "clang"), "", Path("/usr/include/python3.11"), has_header=False)
    monkeypatch.setattr(start_errors.BuildTools, "here", lambda: missing)
    monkeypatch.setattr("mmrl.engine.machine.build_tools.sysconfig.get_python_version", lambda: "3.11")
    monkeypatch.setattr("mmrl.engine.machine.build_tools.sys.executable", "/nowhere/python3")
    with pytest.raises(MMRLError) as caught, start_errors.start_errors("vLLM does not start", "sampler"):
        raise error
    found = caught.value
    assert type(found) is kind and found.exit_code == (2 if kind is ConfigError else 5)
    assert found.what.startswith("vLLM does not start: ") and " ".join(str(error).split())[:40] in found.what
    assert remedy in found.remedy and found.where == "sampler" and found.__cause__ is error
    assert "Traceback" in caplog.text


def test_every_row_of_the_table_is_tested():
    assert {id(known(error)) for error, *_ in CASES} == {id(row) for row in ROWS}


def test_an_error_that_was_raised_from_a_known_one_is_known():
    cause, error = RuntimeError("Failed to find C compiler."), RuntimeError("Engine core initialization failed")
    error.__cause__ = cause
    assert known(error) is known(cause) is not None
    alone = RuntimeError("Engine core initialization failed")
    alone.__context__ = cause  # handled, and no reason of this one
    assert known(alone) is None


def test_an_error_without_a_row_is_a_bug_in_the_learner_and_an_answer_in_vllm():
    with pytest.raises(KeyError), start_errors.start_errors("the learner does not start", "learner"):
        raise KeyError("layers")
    with (
        pytest.raises(ResourceError, match="vLLM does not start: KeyError: 'layers'") as caught,
        start_errors.start_errors("vLLM does not start", "sampler", every=True),
    ):
        raise KeyError("layers")
    assert "engines.log" in caught.value.remedy


def test_a_package_that_a_models_own_code_needs_is_no_broken_installation():
    assert start_errors.known(ImportError("This modeling file requires: einops. Run `pip install einops`")) is None


@pytest.mark.parametrize(
    ("error", "row"),
    [
        (AssertionError("Memory usage increased after sleeping."), DeviceBusyError),
        (RuntimeError(CUDA.format("uncorrectable ECC error encountered")), DeviceBusyError),
        (subprocess.CalledProcessError(1, GCC), ResourceError),
        (subprocess.CalledProcessError(1, ["make"]), None),
        (ModuleNotFoundError("No module named 'a_plugin_needs_it'"), None),
        (invalid(), None),
        (RuntimeError(CUDA.format("an illegal memory access was encountered")), None),
    ],
)
def test_only_errors_of_the_device_have_an_answer_in_a_later_phase(error, row):
    """Plugins and mmrl's own code run there too."""
    with pytest.raises(row or type(error)) as caught, start_errors.start_errors("sampling fails", "it", later=True):
        raise error
    assert row is not None or caught.value is error


LOST = "[gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:9"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), NumericsError("stale"), RuntimeError(LOST)]
)
def test_errors_with_an_answer_of_their_own_pass(error):
    with (
        pytest.raises(type(error)) as caught,
        start_errors.start_errors("vLLM does not start", "sampler", every=True),
    ):
        raise error
    assert caught.value is error


SOURCES = [
    ("vllm/v1/worker/utils.py", "is less than desired GPU memory utilization"),
    ("vllm/v1/worker/gpu_worker.py", "Error in memory profiling. "),
    ("vllm/v1/worker/gpu_worker.py", "Memory usage increased after sleeping."),
    ("vllm/v1/worker/gpu_worker.py", "CuMem allocator can only be used for one instance per process."),
    ("vllm/v1/core/kv_cache_utils.py", "No available memory for the cache blocks. "),
    ("vllm/v1/core/kv_cache_utils.py", "cache is needed, which is larger than the available KV cache "),
    ("vllm/platforms/cuda.py", "Bfloat16 is only supported on GPUs "),
    ("triton/knobs.py", "Cannot find {self.binary}"),
    ("triton/backends/nvidia/driver.py", "libcuda.so cannot found!"),
    ("triton/runtime/errors.py", "class PTXASError("),
    ("deepspeed/ops/op_builder/builder.py", "class MissingCUDAException("),
    ("deepspeed/ops/op_builder/builder.py", "class CUDAMismatchException("),
    ("deepspeed/ops/op_builder/builder.py", "CUDA_HOME does not exist, unable to compile CUDA op(s)"),
    ("deepspeed/runtime/config.py", "class DeepSpeedConfigError("),
    ("deepspeed/runtime/zero/utils.py", "class ZeRORuntimeException("),
    ("torch/utils/cpp_extension.py", "Error building extension '{name}'"),
    ("torch/utils/cpp_extension.py", "Ninja is required"),
    ("torch/_inductor/exc.py", "class InvalidCxxCompiler("),
    ("torch/_inductor/exc.py", "class CppCompileError("),
    ("torch/_inductor/exc.py", "class InductorError("),
]


@pytest.mark.parametrize(("file", "words"), SOURCES)
def test_the_installed_library_has_these_words(file, words):
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    assert words in Path(spec.submodule_search_locations[0], rest).read_text()


def test_tritons_own_errors_without_compiler_and_without_headers_are_known(monkeypatch, tmp_path):
    build = pytest.importorskip("triton.runtime.build")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build._find_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        build.compile_so_from_src("int one;", "one")
    assert known(caught.value).origin == "Triton, runtime/build.py"
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    build._find_compiler.cache_clear()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build.compile_so_from_src("#include <Python.h>", "two")
    assert known(failed.value, later=True).meaning == "the C compiler fails"
