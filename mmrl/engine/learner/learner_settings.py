"""DeepSpeed's settings: those that the learner decides by the device, and those that a config may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.sections import LearnerConfig
from mmrl.engine.device import DeviceKind, merged
from mmrl.errors import ConfigError

REDUCE_BUCKET = 10**8
"""Gradients that DeepSpeed reduces at a time on CUDA. Its buffer is that large whatever the model, at stage 3 for the
length of the run: 0.2 GB in bfloat16, where DeepSpeed's own 500 million take 1 GB. Messages are long enough."""


def deepspeed_settings(learner: LearnerConfig, precision: str, kind: DeviceKind) -> dict[str, Any]:
    """DeepSpeed's settings by a config's section ``learner``; those in ``learner.deepspeed`` come last.

    torch's AdamW steps the weights, wherever they are, in one pass over the memory (``fused``): on a CPU that is
    3.5 times faster than without, and on a GPU nothing temporary is made. DeepSpeed's own AdamW for hosts is compiled
    on first use, and a checkpoint could not be read without it.

    Gradients are reduced beside the backward pass at stage 3 only, which is DeepSpeed's default. At stages 1 and 2,
    DeepSpeed 0.19.8 lets the backward pass wait for the reduction before, so that little is gained. With
    ``overlap_comm: true`` it waits for the whole device at the end of each backward pass that reduces, before anything
    here reads gradients or weights. See ``check_overlap`` for the case that it does not guard.

    One micro-batch per DeepSpeed step is declared; the learner marks the boundary of an optimizer step itself, since
    the number of micro-batches differs from step to step.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.max_grad_norm,
        "zero_optimization": {"stage": learner.zero_stage},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "weight_decay": learner.weight_decay,
                "betas": [0.9, 0.999],
                "torch_adam": True,
                "fused": True,
            },
        },
        "bf16": {"enabled": precision == "bfloat16"},
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }
    if precision == "bfloat16" and learner.zero_stage >= 2:
        # A bfloat16 sum over micro-batches would lose digits as their number grows.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if kind == "cuda" and learner.zero_stage:
        settings["zero_optimization"] |= {"reduce_bucket_size": REDUCE_BUCKET}
    if learner.offload != "none":
        place = {"device": "cpu", "pin_memory": kind == "cuda"}
        settings["zero_optimization"] |= {"offload_optimizer": place}
        settings["zero_optimization"] |= {"offload_param": place} if learner.offload == "parameters" else {}
        settings["zero_force_ds_cpu_optimizer"] = False
    return merged(settings, learner.deepspeed)


LOSSY_SUM = 64
"""Micro-batches from which on their gradients' sum is told of if it is in bfloat16. That has eight binary digits: the
65th of equal gradients is rounded to a multiple of half of itself, and from 256 on each one is lost."""


def lossy_sum(dtype: str, zero_stage: int, microbatches: int) -> str:
    """Words on a sum over micro-batches that loses digits; empty if it does not. See ``deepspeed_settings``."""
    if dtype != "bfloat16" or zero_stage >= 2 or microbatches < LOSSY_SUM:
        return ""
    return (
        f"DeepSpeed sums the gradients of {microbatches} micro-batches in bfloat16 at ZeRO {zero_stage}, which loses "
        "digits: set learner.zero_stage: 2 or 3, or a larger learner.tokens_per_microbatch"
    )


LEARNER_KEYS = frozenset(
    {
        "activation_checkpointing", "aio", "comms_logger", "communication_data_type", "compile", "data_types",
        "dump_state", "flops_profiler", "gradient_predivide_factor", "memory_breakdown", "optimizer",
        "prescale_gradients", "sparse_gradients", "steps_per_print", "torch_autocast", "wall_clock_breakdown",
        "zero_allow_untested_optimizer", "zero_optimization",
    }
)  # fmt: skip
"""DeepSpeed's settings that ``learner.deepspeed`` may hold. The others have a key of their own in mmrl's config, are
decided by the learner, or have no use here. DeepSpeed itself accepts any name in silence."""

LEARNER_SECTIONS = (
    "activation_checkpointing", "aio", "comms_logger", "compile", "data_types", "flops_profiler", "optimizer",
    "torch_autocast", "zero_optimization",
)  # fmt: skip
"""Settings among them that hold settings of their own."""

ZERO_NUMBERS = ("reduce_bucket_size", "stage3_max_reuse_distance", "sub_group_size")
"""Numbers in ``zero_optimization`` that a plan of memory reads."""

OWNED_LEARNER_KEYS = (
    "zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param",
    "zero_optimization.compute_grad_norm", "optimizer.params.lr", "optimizer.params.weight_decay",
    "optimizer.params.fused", "optimizer.params.foreach", "optimizer.params.capturable", "data_types.grad_accum_dtype",
    "compile.passes",
)  # fmt: skip
"""Settings within those that mmrl decides."""


def check_settings(learner: LearnerConfig) -> None:
    """Check what a config's section ``learner`` holds for DeepSpeed.

    Raises:
        ConfigError: A setting is unknown, has another form, is decided by mmrl, or does not go with the section.
    """
    settings = learner.deepspeed
    if "tensor_parallel" in settings:
        raise ConfigError(
            "the learner's layers cannot be divided among ranks: a rank would hold parts of weights, and the "
            "sampler, checkpoints and the reference policy take whole ones; and ranks are given different rows, "
            "where those that share a layer need the same",
            where="learner.deepspeed.tensor_parallel",
            remedy="remove it; learner.zero_stage: 3 divides the same memory among all ranks, and "
            "sampler.tensor_parallel_size divides the sampler's layers",
        )
    refused = sorted(settings.keys() - LEARNER_KEYS)
    refused += [key for key in OWNED_LEARNER_KEYS if _has(settings, key.split("."))]
    if refused:
        raise ConfigError(
            f"learner.deepspeed does not take {', '.join(refused)}",
            where="learner.deepspeed",
            possible=f"{', '.join(sorted(LEARNER_KEYS))}, without {', '.join(OWNED_LEARNER_KEYS)}",
            remedy="check the name, or look among mmrl's own keys of the learner section: `mmrl schema`",
        )

    for key in LEARNER_SECTIONS:
        if key in settings and not isinstance(settings[key], Mapping):
            raise ConfigError(
                f"learner.deepspeed.{key} is {settings[key]!r}, and it holds settings of its own",
                where=f"learner.deepspeed.{key}",
                possible="a mapping, such as zero_optimization: {overlap_comm: true}",
                remedy="write it as DeepSpeed's documentation does, or remove it",
            )
    zero = settings.get("zero_optimization")
    for key, value in zero.items() if isinstance(zero, Mapping) else ():
        if key in ZERO_NUMBERS and not isinstance(value, int | float):
            raise ConfigError(
                f"learner.deepspeed.zero_optimization.{key} is {value!r}, and not a number",
                where=f"learner.deepspeed.zero_optimization.{key}",
                remedy="write a number, such as 5e8, or remove it",
            )
    if compiles("cuda", settings) and learner.sequence_parallel_size > 1:
        raise ConfigError(
            "DeepSpeed would compile passes in which ranks exchange parts of a row, and that has not been tried",
            where=f"learner.deepspeed.compile; learner.sequence_parallel_size: {learner.sequence_parallel_size}",
            remedy="remove learner.deepspeed.compile, or set learner.sequence_parallel_size: 1",
        )


def check_overlap(kind: DeviceKind, settings: Mapping[str, Any], largest: int) -> None:
    """Check that no gradient is freed while it is reduced beside the backward pass.

    At stage 2, DeepSpeed 0.19.8 drops the gradient of a weight that is larger than a bucket, and only with an offloaded
    optimizer tells the allocator that its second stream still reads it (``stage_1_and_2.py``:
    ``_record_gradient_stream``). A CPU has one stream.

    Args:
        settings: DeepSpeed's settings.
        largest: Elements of the largest trained weight.

    Raises:
        ConfigError: One could be.
    """
    zero = settings["zero_optimization"]
    guarded = kind == "cpu" or zero["stage"] != 2 or not zero.get("overlap_comm") or "offload_optimizer" in zero
    bucket = zero.get("reduce_bucket_size", 5 * 10**8)
    if not guarded and largest > bucket:
        raise ConfigError(
            f"at stage 2, DeepSpeed would free a gradient of {largest:,} elements while it is reduced: buckets have "
            f"{bucket:,}",
            where="learner.deepspeed.zero_optimization.overlap_comm: true",
            remedy="remove overlap_comm, set learner.zero_stage: 1 or 3, or set "
            f"learner.deepspeed.zero_optimization.reduce_bucket_size to {largest} or more",
        )


def compiles(kind: DeviceKind, settings: Mapping[str, Any]) -> bool:
    """True if DeepSpeed is to compile the learner's passes (``compile.deepcompile``); on a CPU nothing is compiled."""
    return kind == "cuda" and bool(settings.get("compile", {}).get("deepcompile"))


def _has(settings: Any, path: Sequence[str]) -> bool:
    """True if nested settings have a value at ``path``."""
    for key in path:
        if not isinstance(settings, Mapping) or key not in settings:
            return False
        settings = settings[key]
    return True
