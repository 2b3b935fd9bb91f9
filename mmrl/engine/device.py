"""Every place where CPU and CUDA differ, as pure functions; both answers are tested on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrl.engine import driver

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda"]
SamplerMemory = Literal["weights", "kv_cache"]
"""Parts of vLLM's memory that wake one by one."""

CPU_KV_CACHE_BYTES = 128 * 2**20
CPU_MAX_SEQUENCES = 256
CUDA_MAX_SEQUENCES = (256, 1024)
"""Fewest and most that vLLM samples at once: an evaluation may have more requests than a step, and its second model
runner keeps four bytes a token of the vocabulary for each."""
CPU_BATCHED_TOKENS = 4096
CUDA_BATCHED_TOKENS = 8192
"""Tokens of a step of vLLM: on cards of 70 GiB and more it would take 16,384, whose MLPs alone need 2 GB for 7B. Longer
prompts are prefilled in chunks."""
LOGITS_CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
MERGED_AT_ONCE = {"cpu": 2**19, "cuda": 2**24}
"""Elements of a weight into which an adapter is merged at once: as many as a CPU's cache holds, and on a GPU so many
that they keep it busy and take little memory in float32."""
IMAGE_FEATURE_BYTES = {"cpu": 512 * 2**20, "cuda": 2**31}
"""Image features that are kept for a step if the vision tower is not trained."""
READING_THREADS = {"cpu": 0, "cuda": 4}
"""Threads of a rank that read images ahead: beside a GPU, the host's cores have nothing else to do."""
ADMITTED_AT_ONCE = {"cpu": None, "cuda": 32}
"""Most requests that begin at a step of vLLM's. Their images are preprocessed one by one (8 to 38 ms each), and a GPU
has nothing to do before its first step; None where sampler and preprocessing take turns on the same cores."""
RUNTIME_BYTES = {"cpu": 0, "cuda": 1_500_000_000}
"""A memory plan's allowance beside tensors: CUDA's context and libraries, NCCL's buffers, memory that torch's allocator
has and cannot use."""
SAMPLER_BYTES = {"cpu": 0, "cuda": 3_000_000_000}
"""A memory plan's least allowance for vLLM's share beside weights and KV cache: activations, CUDA graphs, the sampler's
own arrays. What ``sampler_memory`` counts comes beside ``ASLEEP_BYTES`` if that is more."""
ASLEEP_BYTES = {"cpu": 0, "cuda": 1_500_000_000}
"""The part of that allowance that vLLM keeps while it sleeps: CUDA graphs, and workspaces of kernels."""
RANK_BYTES = 3_000_000_000
"""A memory plan's allowance for a rank's process in the host's memory: its packages, CUDA's context, caches of images
(``README.md``), and copies on their way."""

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables, unless the user has set them: errors are shown, progress and advice are not."""
VERBOSE = {
    "MMRL_VERBOSE": "1",  # for plugins
    "HF_HUB_DISABLE_PROGRESS_BARS": "0",
    "TORCH_CPP_LOG_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "warning",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""In place of ``QUIET`` with ``--verbose``."""


WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Environment variables, unless the user has set them, that OpenMP reads when torch is imported: threads without work
sleep. Spinning ones take the cores from reward workers and from whatever else runs; a step was then up to ten times
slower."""


PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment variable, unless the user has set it, that torch reads with its first tensor: large ones get large pages.
A weight sync on a CPU is mostly fresh memory, which the kernel clears page by page: 1.6 times faster."""


def detect() -> DeviceKind:
    """The kind of device that this process trains on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_gpu(kind: DeviceKind) -> None:
    """Raises ResourceError if this process would train on a CPU although it has a GPU; see ``driver.unused_gpu``."""
    if kind == "cpu" and (error := driver.unused_gpu(driver.CudaFacts.here())):
        raise error


def keep_convolutions_whole() -> None:
    """Let this process compute float32 convolutions in float32.

    torch lets cuDNN round their inputs to TF32 by default, and no other product's. A learner's patch embedding is a
    convolution, and vLLM's a plain product, so their log-probs would differ. torch refuses to read the older of its two
    settings once the newer one, ``cudnn.conv.fp32_precision``, is written, and its compiler reads the older one.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False


def variables(kind: DeviceKind, pipeline_parallel_size: int = 1) -> dict[str, str]:
    """Environment variables of a process, to be set before transformers, vLLM and DeepSpeed are imported.

    On a CPU, OpenMP threads are not bound (the learner shares them) and nothing is compiled: compiling the helpers
    of a tiny model takes longer than its test.
    """
    common = {
        "DS_ACCELERATOR": kind,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # the user's own may be 1, for another program: nothing here needs it
        "TOKENIZERS_PARALLELISM": "false",
    }
    common["VLLM_USE_V2_MODEL_RUNNER"] = str(model_runner(kind, pipeline_parallel_size) - 1)
    if kind == "cuda":
        # These map the memory of other ranks' GPUs into a process, and each rank's process sees its own only, as number
        # 0: torch refuses two ranks on "overlapping devices", FlashInfer was not made for it. NCCL is left.
        return common | {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def model_runner(kind: DeviceKind, pipeline_parallel_size: int = 1) -> Literal[1, 2]:
    """The number of vLLM's model runner; each takes logits processors of a class of its own.

    vLLM 0.32's first runner draws the noise of seeded requests one request after the other: on a GPU about 10
    microseconds each, at every token. Its second draws it in one kernel, and needs Triton, which has no CPU;
    and it does not send the logits of a pipeline's last ranks to the others, which have to draw the same tokens.
    The second one of vLLM 0.24 takes no logits processors.
    """
    return 2 if kind == "cuda" and pipeline_parallel_size == 1 and _second_runner_takes_processors() else 1


def _second_runner_takes_processors() -> bool:
    """True if the installed vLLM has a module for them, which is not imported: vLLM would read its environment too
    early. Without vLLM the answer is that of the version that mmrl asks for.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return True
    place = Path(found.origin).parent.joinpath("v1", "worker", "gpu", "sample", "logits_processor")
    return place.is_dir() or place.with_suffix(".py").is_file()


def packs_experts(kind: DeviceKind) -> bool:
    """True if vLLM's kernels for experts have a layout of weights of their own, as those of a CPU."""
    return kind == "cpu"


def expert_columns(kind: DeviceKind) -> int:
    """The number of which each expert's columns on a rank must be a multiple.

    vLLM's CPU kernels pad other experts at the first load, and cannot take new weights then.
    """
    return 32 if kind == "cpu" else 1


def returns_experts(kind: DeviceKind, stages: int = 1) -> bool:
    """True if vLLM can tell the experts that it has chosen: the second model runner of vLLM 0.32 alone does.

    Args:
        stages: Stages of its pipeline.
    """
    return model_runner(kind, stages) == 2


def rank_variables(
    kind: DeviceKind, *, rank: int, node_rank: int, world_size: int, address: str, port: int
) -> dict[str, str]:
    """Environment variables that tell a process which rank it is, and where rank 0 listens.

    LOCAL_RANK chooses the GPU. Each rank's process sees a single one, which is number 0 there.

    Args:
        node_rank: Its place among the ranks of its node.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(node_rank if kind == "cpu" else 0),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch need not host the store: see cluster.process.host_meeting
    }


def precision(kind: DeviceKind, requested: str) -> str:
    """``float32`` or ``bfloat16``; ``auto`` is bfloat16 on CUDA and float32 on a CPU."""
    if requested != "auto":
        return requested
    return "bfloat16" if kind == "cuda" else "float32"


def lacks_state_kernels(kind: DeviceKind) -> bool:
    """True if linear attention runs in plain torch on a GPU, for lack of flash-linear-attention."""
    return kind == "cuda" and importlib.util.find_spec("fla") is None


def torch_device(kind: DeviceKind) -> str:
    """The torch device of a rank: the one GPU that its process sees, or the first."""
    return "cuda:0" if kind == "cuda" else "cpu"


def process_group_backend(kind: DeviceKind) -> str:
    """The backend of torch.distributed."""
    return "nccl" if kind == "cuda" else "gloo"


def sampler_arguments(
    kind: DeviceKind,
    gpu_memory_utilization: float,
    max_tokens: int,
    num_sequences: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> dict[str, Any]:
    """Arguments of vLLM that depend on the device.

    On a CPU no prompt is prefilled in chunks: vLLM 0.32 would rewind the generator of a seeded request after an
    unfinished chunk, which only CUDA's generators can ("CPU Generator does not use offset").
    vLLM's own all-reduce looks for peers among the GPUs that a process sees; each rank's process sees one. The fusion
    of all-reduce and norm is FlashInfer's: see ``variables``. In a pipeline a batch is
    scheduled when the one before has its tokens, as on a CPU, where it was tried.

    Args:
        num_sequences: Completions that a rank samples in a step.
    """
    if kind == "cuda":
        alone: dict[str, Any] = {}
        if tensor_parallel_size > 1:
            alone["disable_custom_all_reduce"] = True
            alone["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        if pipeline_parallel_size > 1:
            alone["async_scheduling"] = False
        fewest, most = CUDA_MAX_SEQUENCES
        return {
            "gpu_memory_utilization": gpu_memory_utilization,
            "enable_sleep_mode": True,
            "max_num_seqs": min(max(num_sequences, fewest), most),
            "max_num_batched_tokens": CUDA_BATCHED_TOKENS,
            **alone,
        }
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "max_num_seqs": CPU_MAX_SEQUENCES,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, CPU_BATCHED_TOKENS),
    }


def sleep_level(kind: DeviceKind) -> int | None:
    """vLLM's sleep level while the learner owns the device; None where it need not sleep.

    Level 1 keeps what was allocated while the model was loaded. ``sleep_backend`` drops the weights of it.
    """
    return 1 if kind == "cuda" else None


def attention(kind: DeviceKind, dtype: str) -> str:
    """The registered attention function over packed rows; CUDA's variable-length kernel takes half precision only."""
    return "mmrl_packed_varlen" if packs_lengths(kind, dtype) else "mmrl_packed_sdpa"


def packs_lengths(kind: DeviceKind, dtype: str) -> bool:
    """True if attention takes sequences of several lengths in one row, and no mask."""
    return (kind, dtype) == ("cuda", "bfloat16")


def varlen_computes(head_size: int, *, looks_ahead: bool) -> bool:
    """True if CUDA's variable-length kernel computes a layer: it takes heads of up to 256, and knows causal masks and
    windows, but not tokens of an image that see each other.

    Args:
        looks_ahead: True if tokens see later ones.
    """
    return head_size <= 256 and not looks_ahead


def sampler_looks_ahead(kind: DeviceKind) -> bool:
    """True if vLLM's attention can let tokens of an image see later ones; vLLM 0.32's on a CPU masks them in silence
    (``supports_mm_prefix``)."""
    return kind == "cuda"


def tower_attention(kind: DeviceKind, dtype: str) -> str:
    """The attention function of a vision tower: one call for all images or windows, or transformers' loop over them,
    which starts 2,240 kernels for an image of a megapixel."""
    return "mmrl_flash_tower" if (kind, dtype) == ("cuda", "bfloat16") else "sdpa"


def repeats_heads(torch_device: str, dtype: torch.dtype, head_size: int = 0, *, masked: bool = False) -> bool:
    """True if plain attention is to get keys and values once for each query head that reads them.

    On a GPU torch's kernels for float32, for heads of more than 256 and for masks take no fewer heads of those. In
    their place torch would hold the scores of all queries and keys.

    Args:
        masked: True if the call has a mask that is not causal.
    """
    return torch_device.startswith("cuda") and (dtype.itemsize == 4 or head_size > 256 or masked)


def tower_bounds(torch_device: str, dtype: torch.dtype) -> str:
    """The torch device on which a vision tower's attention looks for its bounds. A loop asks for them as plain numbers,
    and would wait for a GPU in every layer."""
    kind: DeviceKind = "cuda" if torch_device.startswith("cuda") else "cpu"
    looped = tower_attention(kind, str(dtype).removeprefix("torch.")) == "sdpa"
    return "cpu" if looped else torch_device


def moved(values: torch.Tensor, torch_device: str) -> torch.Tensor:
    """The values of the host's memory on a device.

    A GPU copies from pinned memory while the host goes on. With other memory the host would wait for all work under
    way on the GPU.
    """
    if torch_device.startswith("cuda"):
        return values.pin_memory().to(torch_device, non_blocking=True)
    return values.to(torch_device)


def keeps_freed_memory(kind: DeviceKind) -> bool:
    """True if a rank keeps host memory that it has freed: on a CPU each update needs as much of it as the last one."""
    return kind == "cpu"


def free_cache(kind: DeviceKind) -> None:
    """Give memory that torch keeps for later back to the device, so that vLLM can have it."""
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if the error says that the device, or on a CPU the machine, has no memory left."""
    import torch

    # CUDA's libraries and the allocator of a CPU raise plain RuntimeErrors; cuBLAS and cuDNN fail when they begin.
    said = str(error).lower()
    words = ("out of memory", "can't allocate memory", "status_alloc_failed", "failed to cuda calloc")
    return isinstance(error, torch.OutOfMemoryError) or any(each in said for each in words)


def used_memory_bytes(kind: DeviceKind) -> int:
    """Memory in use on the GPU, or this process's peak of resident memory.

    A GPU's driver answers, so other processes count too. torch keeps freed memory, so this is the peak since its cache
    was emptied. torch's own peak is another number: it counts vLLM's weights and KV cache even while they sleep and
    hold no memory, since their tensors still exist.
    """
    if kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reference_place(kind: DeviceKind, zero_stage: int) -> Literal["sharded", "host", "device"]:
    """The place of the reference policy's weights between its uses.

    ``sharded`` over the ranks like the policy's; else whole on every rank, in the ``host``'s memory beside a GPU. On a
    CPU host and device are one, and nothing is moved.
    """
    if zero_stage == 3:
        return "sharded"
    return "host" if kind == "cuda" else "device"


def total_memory_bytes(kind: DeviceKind) -> int | None:
    """Memory of the device; None on a CPU, where nothing is handed over."""
    found = free_memory_bytes(kind)
    return None if found is None else found[1]


def free_memory_bytes(kind: DeviceKind) -> tuple[int, int] | None:
    """(free, total) memory of the device, other processes' use counted; None on a CPU, where nothing is handed over."""
    if kind != "cuda":
        return None
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if getattr(torch.cuda.get_device_properties(0), "is_integrated", False):
        import psutil  # the host's memory, where files in the kernel's cache count as free, as vLLM counts it

        free = psutil.virtual_memory().available
    return int(free), int(total)


def overruled(kind: DeviceKind, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The values that take the place of the user's own in ``sampler.engine`` on such a device, as vLLM would not start
    with those, or would end in a step."""
    forced = {} if kind == "cuda" else {"enforce_eager": True, "enable_chunked_prefill": False}
    return {key: value for key, value in forced.items() if key in engine and engine[key] != value}


def spare_memory_bytes(kind: DeviceKind) -> int:
    """Memory of the device, or on a CPU of the machine, that nobody uses."""
    found = free_memory_bytes(kind)
    if found is not None:
        return found[0]
    import psutil

    return int(psutil.virtual_memory().available)


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the user's merged in; nested ones are merged key by key."""
    result = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result
