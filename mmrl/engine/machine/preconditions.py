"""Checks before gigabytes are fetched or loaded: vLLM's version, tools that compile, interfaces, free memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.machine.build_tools import BuildTools, check_build_tools
from mmrl.engine.machine.free_memory import Need, await_memory
from mmrl.engine.machine.interfaces import check_interfaces, interfaces
from mmrl.engine.machine.vllm_version import check_vllm


def check_process(
    kind: device.DeviceKind,
    config: Config,
    *,
    samples: bool,
    least_bytes: int = 0,
    tell: Callable[[str], object] = lambda text: None,
) -> None:
    """Refuse a process in which no engine would start; waits for memory that ended ranks hold.

    Args:
        samples: True if it samples.
        least_bytes: Bytes that a rank of the smallest setting takes of a GPU.
        tell: Called with what is waited for.

    Raises:
        ResourceError: Names the missing part, and the command or setting that mends it.
    """
    check_interfaces(os.environ, interfaces(), kind)
    on_vllm = samples and config.sampler.name == "vllm"
    if on_vllm:
        check_vllm()
        if kind == "cuda":
            check_build_tools(BuildTools.here())
    share = config.sampler.gpu_memory_utilization if on_vllm else 0.0
    await_memory(kind, Need(share, least_bytes), tell=tell)
