"""Every place where CPU and CUDA differ, as pure functions; both answers are tested on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

DeviceKind = Literal["cpu", "cuda"]
SamplerMemory = Literal["weights", "kv_cache"]
"""Parts of vLLM's memory that wake one by one."""

CPU_KV_CACHE_BYTES = 128 * 2**20
CPU_MAX_SEQUENCES = 256
CPU_BATCHED_TOKENS = 4096
LOGITS_CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
FEATURE_BYTES = {"cpu": 512 * 2**20, "cuda": 2**31}
"""Image features that are kept for a step if the vision tower is not trained."""
RUNTIME_BYTES = {"cpu": 0, "cuda": 1_500_000_000}
"""Allowed in a memory plan for what is no tensor: CUDA's context and libraries, NCCL's buffers, memory that torch's
allocator has and cannot use."""
SAMPLER_BYTES = {"cpu": 0, "cuda": 3_000_000_000}
"""Allowed in a memory plan for what vLLM's share holds beside weights and KV cache: activations, CUDA graphs, the
sampler's own arrays."""
ASLEEP_BYTES = {"cpu": 0, "cuda": 1_500_000_000}
"""Allowed in a memory plan for what vLLM keeps of that while it sleeps."""
REDUCE_BUCKET = 10**8
"""Gradients that DeepSpeed reduces at a time on CUDA. Its buffer is that large whatever the model, at stage 3 for the
length of the run: 0.2 GB in bfloat16, where DeepSpeed's own 500 million take 1 GB. Messages are long enough."""

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables, unless the user has set them: errors are shown, progress and advice are not."""


WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Environment variables, unless the user has set them, that OpenMP reads when torch is imported: threads without work
sleep. Spinning ones take the cores from reward workers and from whatever else runs; a step was then up to ten times
slower."""


def detect() -> DeviceKind:
    """The kind of device that this process trains on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def environment(kind: DeviceKind) -> dict[str, str]:
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
    if kind == "cuda":
        # vLLM 0.32 would choose its second model runner, which takes logits processors of another class.
        return common | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def rank_environment(
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


def torch_device(kind: DeviceKind) -> str:
    """The torch device of a rank: the one GPU that its process sees, or the first."""
    return "cuda:0" if kind == "cuda" else "cpu"


def process_group_backend(kind: DeviceKind) -> str:
    """The backend of torch.distributed."""
    return "nccl" if kind == "cuda" else "gloo"


def sampler_arguments(
    kind: DeviceKind, memory_fraction: float, max_tokens: int, tensor_parallel_size: int = 1
) -> dict[str, Any]:
    """Arguments of vLLM that depend on the device.

    On a CPU no prompt is prefilled in chunks: vLLM 0.32 would rewind the generator of a seeded request after an
    unfinished chunk, which only CUDA's generators can ("CPU Generator does not use offset").
    vLLM's own all-reduce looks for peers among the GPUs that a process sees; each rank's process sees one.
    """
    if kind == "cuda":
        alone = {} if tensor_parallel_size == 1 else {"disable_custom_all_reduce": True}
        return {"gpu_memory_utilization": memory_fraction, "enable_sleep_mode": True, **alone}
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "max_num_seqs": CPU_MAX_SEQUENCES,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, CPU_BATCHED_TOKENS),
    }


def sleep_level(kind: DeviceKind) -> int | None:
    """vLLM's sleep level while the learner owns the device; None where it need not sleep.

    Level 1 keeps the weights in host memory: a policy that has not changed is not sent again. Level 2 drops them, and
    every tensor that is neither parameter nor buffer.
    """
    return 1 if kind == "cuda" else None


def learner_config(
    kind: DeviceKind,
    *,
    dtype: str,
    zero_stage: int,
    max_grad_norm: float,
    lr: float,
    weight_decay: float,
    offload: str = "none",
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """DeepSpeed's configuration.

    What is offloaded is stepped by torch's AdamW: DeepSpeed's own for hosts is compiled on first use, and a checkpoint
    could not be read without it.

    One micro-batch per DeepSpeed step is declared; the learner marks the boundary of an optimizer step itself, since
    the number of micro-batches differs from step to step.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "weight_decay": weight_decay, "betas": [0.9, 0.999], "torch_adam": True},
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }
    if dtype == "bfloat16" and zero_stage >= 2:
        # In bfloat16, the sum over micro-batches would lose digits with their number.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if kind == "cuda":
        config["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True}
    else:
        config["optimizer"]["params"]["fused"] = True  # one pass over the memory: on a CPU 3.5 times faster
    if kind == "cuda" and zero_stage:
        config["zero_optimization"] |= {"reduce_bucket_size": REDUCE_BUCKET}
    if offload != "none":
        place = {"device": "cpu", "pin_memory": kind == "cuda"}
        config["zero_optimization"] |= {"offload_optimizer": place}
        config["zero_optimization"] |= {"offload_param": place} if offload == "parameters" else {}
        config["zero_force_ds_cpu_optimizer"] = False
    return _merge(config, overrides)


LEARNER_KEYS = frozenset(
    {
        "activation_checkpointing", "aio", "comms_logger", "communication_data_type", "compile", "data_types",
        "dump_state", "flops_profiler", "gradient_predivide_factor", "memory_breakdown", "optimizer",
        "prescale_gradients", "sparse_gradients", "steps_per_print", "torch_autocast", "wall_clock_breakdown",
        "zero_allow_untested_optimizer", "zero_optimization",
    }
)  # fmt: skip
"""DeepSpeed's settings that ``learner.deepspeed`` may hold: the others have a key of their own in mmrl's config, are
decided by the learner, or have no use here. DeepSpeed itself accepts any name in silence."""

OWNED_LEARNER_KEYS = (
    "zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
    "zero_optimization.compute_grad_norm", "optimizer.params.lr", "optimizer.params.weight_decay",
    "optimizer.params.fused", "optimizer.params.foreach", "optimizer.params.capturable", "data_types.grad_accum_dtype",
)  # fmt: skip
"""Settings within those that are mmrl's own."""


def attention(kind: DeviceKind, dtype: str) -> str:
    """The registered attention function over packed rows; CUDA's variable-length kernel takes half precision only."""
    return "mmrl_packed_varlen" if (kind, dtype) == ("cuda", "bfloat16") else "mmrl_packed_sdpa"


def free_cache(kind: DeviceKind) -> None:
    """Give memory that torch keeps for later back to the device, so that vLLM can have it."""
    if kind == "cuda":
        import torch

        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that the device, or on a CPU the machine, has no memory left."""
    import torch

    # CUDA's libraries and the allocator of a CPU raise plain RuntimeErrors.
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "can't allocate memory" in said


def memory_bytes_max(kind: DeviceKind) -> int:
    """Peak memory: allocated on the device, or resident in this process."""
    if kind == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_bytes_offloaded(trained: int, others: int, dtype: str, offload: str) -> int:
    """Bytes in host memory of what all ranks offload together.

    Of each trained parameter: the float32 weight and AdamW's two averages, and the gradient as the optimizer takes it;
    with ``parameters`` all weights too.

    Args:
        trained: Parameters that are trained.
        others: Parameters that are not.
    """
    if offload == "none":
        return 0
    width = 2 if dtype == "bfloat16" else 4
    return trained * (12 + 4) + ((trained + others) * width if offload == "parameters" else 0)


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
    return int(free), int(total)


def _merge(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
