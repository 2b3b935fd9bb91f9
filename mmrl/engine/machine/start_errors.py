"""The errors of vLLM, Triton, DeepSpeed and CUDA while engines start, some of which come later too, and their meaning.

Read in vLLM 0.32, Triton 3.9, DeepSpeed 0.19.8 and torch 2.13. The first row that fits an error, or one that it was
raised from, decides; without a row the error keeps its own words. Memory that runs out has a table of its own, in
``full_device``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mmrl.engine import device
from mmrl.engine.machine.build_tools import BuildTools
from mmrl.errors import ConfigError, DeviceBusyError, MMRLError, ResourceError

_COLLECTIVE = re.compile("gloo|nccl|torch.distributed", re.IGNORECASE)
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connect\w* .*(fail|refused)|remote process exit", re.IGNORECASE
)
"""Words of Gloo, NCCL and torch's store that say that another process of a collective is gone."""
WORDS = 600
"""Characters of an error's text that are shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of error.

    Attributes:
        origin: The library that raises it, and where.
        kinds: Names of its classes, or of their bases.
        pattern: A regular expression for its text.
        meaning: The sentence for people; its own text follows.
        remedy: The next thing to do.
        error: The class in its place, which decides the exit code. ``DeviceBusyError`` uses up a restart.
        later: True if it can come in a later phase: kernels are compiled when they are first used.
    """

    origin: str
    kinds: tuple[str, ...]
    pattern: str
    meaning: str
    remedy: str
    error: type[MMRLError] = ResourceError
    later: bool = False

    def fits(self, error: BaseException) -> bool:
        """True if the error is of this kind."""
        names = {each.__name__ for each in type(error).__mro__}
        return not names.isdisjoint(self.kinds) and re.search(self.pattern, str(error), re.IGNORECASE) is not None


UNREACHED = "the ranks do not reach each other"
_BUSY = "end other processes on the device (nvidia-smi lists them), or lower sampler.gpu_memory_utilization"
_ROOM = "raise sampler.gpu_memory_utilization (sampler.engine.kv_cache_memory_bytes where it is set), lower "
_ROOM += "data.max_prompt_tokens or sampler.max_new_tokens, or raise "
_ROOM += "sampler.tensor_parallel_size (and cluster.ranks)"
_TOOLS = "`mmrl doctor` names the compiler and the headers that are missing"
_INSTALL = "install what mmrl pins, best in a new environment: bash examples/setup/install.sh, or pip install "
_INSTALL += "'mmrl-train[gpu]'"
_KEYS = "look at sampler.engine (sampler.engine={} takes back what a file has there)"
_NETWORK = "see that nodes reach each other over that interface: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name it "
_NETWORK += "(`mmrl doctor CONFIG`); NCCL_DEBUG=INFO tells what NCCL tries"

ROWS = (
    # Memory of the device.
    Row(
        "vLLM, v1/worker/utils.py: request_memory",
        ("ValueError",),
        r"Free memory on device .* is less than desired GPU memory utilization",
        "another process holds memory of the device that vLLM wants",
        _BUSY,
        DeviceBusyError,
    ),
    Row(
        "vLLM, v1/worker/gpu_worker.py: determine_available_memory",
        ("AssertionError",),
        r"Error in memory profiling",
        "another process gave memory of the device back while vLLM measured it",
        _BUSY,
        DeviceBusyError,
    ),
    Row(
        "vLLM, v1/worker/gpu_worker.py: sleep",
        ("AssertionError",),
        r"Memory usage increased after sleeping",
        "another process took memory of the device while vLLM fell asleep",
        _BUSY,
        DeviceBusyError,
        later=True,
    ),
    Row(
        "vLLM, v1/core/kv_cache_utils.py",
        ("ValueError",),
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "vLLM's share of the device has no room for the longest sequence beside the weights",
        _ROOM,
    ),
    Row(
        "vLLM, v1/worker/gpu_worker.py: memory pool",
        ("AssertionError",),
        r"can only be used for one instance per process",
        "there is a vLLM in this process already",
        "start a new process for a further engine",
    ),
    # Compilers.
    Row(
        "Triton, runtime/build.py",
        ("RuntimeError",),
        r"Failed to find C(\+\+)? compiler",
        "Triton finds no compiler",
        _TOOLS,
        later=True,
    ),
    Row(
        "torch, _inductor/exc.py, which holds the compiler's error as text",
        ("InductorError", "BackendCompilerFailed"),
        r"CalledProcessError|Failed to find C|Python\.h",
        "torch cannot compile a kernel",
        _TOOLS,
        later=True,
    ),
    Row(
        "torch, _inductor/exc.py",
        ("InvalidCxxCompiler", "CppCompileError"),
        "",
        "torch cannot compile: there is no C++ compiler that works",
        "install one and have it on the PATH: apt-get install g++ (dnf install gcc-c++)",
        later=True,
    ),
    Row(
        "Triton, backends/nvidia/compiler.py",
        ("PTXASError",),
        "",
        "Triton's assembler fails on a kernel",
        f"{_INSTALL}; TRITON_PTXAS_PATH may name another ptxas",
        later=True,
    ),
    Row(
        "Triton, knobs.py",
        ("RuntimeError",),
        r"Cannot find (ptxas|cuobjdump|nvdisasm)",
        "Triton lacks a part of itself",
        _INSTALL,
        later=True,
    ),
    Row(
        "Triton, backends/nvidia/driver.py",
        ("AssertionError", "CalledProcessError"),
        r"libcuda\.so cannot found|ldconfig",
        "Triton does not find NVIDIA's driver",
        "have libcuda.so.1 on LD_LIBRARY_PATH, or run ldconfig as root where the driver is installed",
    ),
    Row(
        "Triton, runtime/build.py: the compiler's exit status",
        ("CalledProcessError",),
        r"-shared",
        "the C compiler fails",
        _TOOLS,
        later=True,
    ),
    Row(
        "DeepSpeed, ops/op_builder/builder.py; torch, utils/cpp_extension.py",
        ("MissingCUDAException", "CUDAMismatchException", "RuntimeError"),
        r"CUDA_HOME does not exist|unable to compile CUDA op|does not match the version torch was compiled with"
        r"|Error building extension|Unable to JIT load|Ninja is required",
        "an extension of DeepSpeed cannot be compiled",
        "take out of learner.deepspeed what needs one (mmrl's own settings need none), or install the CUDA toolkit of "
        "torch's version, g++ and ninja",
    ),
    Row(
        "FlashInfer, jit/cpp_ext.py",
        ("RuntimeError",),
        r"Could not find nvcc|Ninja build failed",
        "FlashInfer cannot compile its kernels",
        "install the CUDA toolkit (nvcc) of torch's version, or do without: VLLM_USE_FLASHINFER_SAMPLER=0",
        later=True,
    ),
    # Installation and machine.
    Row(
        "Python",
        ("ImportError",),
        r"\.so\b|\b(torch\w*|vllm|deepspeed|triton|transformers|flashinfer|flash_attn|xgrammar|cuda|numpy)\b",
        "a package that vLLM or DeepSpeed needs cannot be imported",
        _INSTALL,
    ),
    Row(
        "vLLM, platforms/cuda.py: check_if_supports_dtype",
        ("ValueError",),
        r"Bfloat16 is only supported on GPUs",
        "this GPU has no bfloat16",
        "set model.dtype: float32",
        ConfigError,
    ),
    Row(
        "CUDA",
        ("RuntimeError",),
        r"no kernel image is available|unsupported toolchain|device kernel image is invalid"
        r"|driver version is insufficient",
        "the installed packages have no kernels for this GPU or its driver",
        "update NVIDIA's driver, or install a torch and a vLLM that were built for this GPU",
        later=True,
    ),
    Row(
        "CUDA",
        ("RuntimeError",),
        r"(CUDA|NVML).*(uncorrectable ECC|busy or unavailable|unknown error|GPU is lost)|No CUDA GPUs are available",
        "the GPU cannot be used",
        "look at it with nvidia-smi: a process may hold it alone, or it needs a reset; CUDA_VISIBLE_DEVICES can leave "
        "it out",
        DeviceBusyError,
        later=True,
    ),
    Row(
        "NCCL, misc/shmutils.cc",
        ("DistError", "RuntimeError"),
        r"shared memory segment|/dev/shm",
        "ranks of one machine find too little shared memory",
        "give containers more: docker run --ipc=host, or --shm-size=8g; else free /dev/shm",
    ),
    Row(
        "NCCL and Gloo",
        ("DistError", "RuntimeError"),
        r"NCCL error|ncclSystemError|ncclRemoteError|ncclInternalError|ncclUnhandledCudaError|gloo",
        UNREACHED,
        _NETWORK,
    ),
    Row(
        "the file system",
        ("OSError",),
        r"No space left on device|Read-only file system|Permission denied|Disk quota exceeded",
        "a folder cannot be written",
        "make room, or name folders that can be written: TMPDIR, VLLM_CACHE_ROOT, TRITON_CACHE_DIR, "
        "TORCHINDUCTOR_CACHE_DIR",
    ),
    # Settings.
    Row(
        "vLLM's and DeepSpeed's configuration (pydantic)",
        ("ValidationError",),
        "",
        "a setting is not possible",
        f"{_KEYS}, and at learner.deepspeed",
        ConfigError,
    ),
    Row(
        "DeepSpeed, runtime/config.py, runtime/zero",
        ("DeepSpeedConfigError", "ZeRORuntimeException"),
        "",
        "DeepSpeed does not take its settings",
        "look at learner.deepspeed",
        ConfigError,
    ),
)


def known(error: BaseException, *, later: bool = False) -> Row | None:
    """The first row for an error or one that it was raised from; with ``later``, of those that are not of a start."""
    seen: BaseException | None = error
    while seen is not None:
        for row in ROWS:
            if row.fits(seen) and (row.later or not later):
                return row
        seen = seen.__cause__
    return None


def words_of(error: BaseException) -> str:
    """An error's class and text in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:WORDS]


def tells_of_a_lost_rank(text: str) -> bool:
    """True if an error's text says that another process of a collective is gone."""
    return bool(_COLLECTIVE.search(text) and _PEER_GONE.search(text))


@contextmanager
def start_errors(what: str, where: str, *, every: bool = False, later: bool = False) -> Iterator[None]:
    """Turn what a library raises in a block into errors with an answer.

    Errors that say that memory ran out, or that another rank is gone, pass: others know more of them.

    Args:
        what: The failure, such as ``vLLM does not start``.
        where: The config's section.
        every: True if every exception gets an answer; else those without a row stay as they are.
        later: True in a phase after the start, for the rows that it can have.

    Raises:
        MMRLError: As ``ROWS`` say.
    """
    try:
        yield
    except MMRLError:
        raise
    except Exception as error:
        row = known(error, later=later)
        is_full = isinstance(error, RuntimeError) and device.is_out_of_memory(error)
        if (row is None and not every) or is_full or tells_of_a_lost_rank(str(error)):
            raise
        # The traceback goes to where engines write: RUN/engines.log.
        logging.getLogger(__name__).error(what, exc_info=True)
        own = words_of(error)
        if row is None:
            remedy = f"{_KEYS}; the traceback is above, or in RUN/engines.log"
            raise ResourceError(f"{what}: {own}", where=where, remedy=remedy) from error
        raise row.error(f"{what}: {row.meaning}: {own}", where=where, remedy=_remedy(row)) from error


def _remedy(row: Row) -> str:
    """A row's remedy, with the tools that are missing here if it is about them."""
    if row.remedy != _TOOLS:
        return row.remedy
    tools = BuildTools.here()
    lacks = [] if tools.compiler else [tools.compiler_remedy]
    lacks += [] if tools.has_header else [tools.header_remedy]
    return "; ".join([*lacks, row.remedy])
