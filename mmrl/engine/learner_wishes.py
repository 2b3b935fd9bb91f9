"""Wishes in ``learner.deepspeed`` that are safe, or have an effect, on some devices only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.engine.device import DeviceKind
from mmrl.errors import ConfigError


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
