"""The end of a process whose vLLM sleeps: its exit functions would free memory that it has already given back.

vLLM 0.32 shuts its engine down when the engine is collected or the process ends, and frees what its allocator holds.
Each segment that sleeps then fails with a line "CUDA Error" on stderr. The process is about to end anyway, and the
driver takes everything back.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

ALLOCATOR = "vllm.device_allocator.cumem"
"""The module of vLLM's allocator that can sleep; it is imported where it is used."""


def leave_asleep(llm: Any) -> None:
    """Keep a sleeping vLLM as it is until the process has ended; it cannot be used again.

    Its process groups are left, which vLLM would have done. What this does not find in another version of vLLM is left
    to vLLM: then the lines come.

    Args:
        llm: vLLM's ``LLM``.
    """
    client = getattr(llm.llm_engine, "engine_core", None)
    # vLLM has no other way to end without freeing: the client's public `shutdown` frees too.
    finalizer = getattr(client, "_finalizer", None)
    if isinstance(finalizer, weakref.finalize):
        finalizer.detach()
    allocator = getattr(getattr(sys.modules.get(ALLOCATOR), "CuMemAllocator", None), "instance", None)
    pools = getattr(allocator, "allocator_and_pools", None)
    if isinstance(pools, dict):
        _keep_for_good([dict(pools), allocator])
        pools.clear()  # vLLM's exit function drops what is in it
    _keep_for_good(llm)
    _leave_groups()


def _keep_for_good(kept: Any) -> None:
    """Keep an object beyond the end of the interpreter, which would otherwise destroy it in an order of its own."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _leave_groups() -> None:
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
