"""The group in which weights travel: learner rank 0 and every rank that samples, which share no other group.

torch.distributed knows one default group in a process, and that is the learner's, or a sampler's own. So this one is
made by hand, on a store of its own at learner rank 0. Orders and what is sent first (names, shapes, types) travel over
the store, the weights themselves over gloo or NCCL.

Nothing waits for ever: every wait for the store, the group or a bucket ends after ``WAIT_S``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from mmrl.engine import device
from mmrl.errors import first_line

WAIT_S = 300.0
"""Seconds in which a bucket, the answer to an order, or the members of a new group have to come."""
ROOT = 0
"""Learner rank 0's number in the group; sampler rank ``r`` is number ``r + 1``."""


class WeightsGroup:
    """The members that are connected, of one generation.

    Args:
        store: The client's own; no other thread may use it.
        rank: This process's number in the group.
        size: The number of members.

    Raises:
        RuntimeError: A member does not come.
    """

    def __init__(self, kind: device.DeviceKind, store: Any, rank: int, size: int, generation: int) -> None:
        own = torch.distributed.PrefixStore(f"weights/group {generation}", store)  # type: ignore[attr-defined]
        patience, distributed = timedelta(seconds=WAIT_S), torch.distributed
        self.generation, self.torch_device = generation, device.torch_device(kind)
        if kind == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = patience
            with _errors_raised():
                self._group: Any = distributed.ProcessGroupNCCL(own, rank, size, options)
        else:
            self._group = distributed.ProcessGroupGloo(own, rank, size, patience)

    def broadcast(self, bucket: torch.Tensor) -> Transfer:
        """Begin to send a bucket, or to receive one; all members call it in the same order."""
        return Transfer(bucket, self._group.broadcast(bucket, ROOT))

    def close(self) -> None:
        """Leave the group, and give up what is under way."""
        with suppress(RuntimeError):  # one that has failed already
            self._group.abort()
        self._group = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bucket on its way."""

    bucket: torch.Tensor
    work: Any

    def result(self) -> torch.Tensor:
        """The bucket, when it is there.

        Raises:
            RuntimeError: A member is lost, or the time is over.
        """
        self.work.wait(timedelta(seconds=WAIT_S))
        return self.bucket


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Let NCCL groups that are made in the block fail where they are waited for.

    torch's own thread would end the whole process of the learner when a rank that samples is lost.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def client_of(address: str, port: int) -> Any:
    """A connection to the store; each thread that waits needs one of its own."""
    patience = timedelta(seconds=WAIT_S)
    store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    return store(address, port, is_master=False, timeout=patience)


def awaited(store: Any, key: str) -> Any:
    """The object at a key, when it is there; None if it does not come within the time.

    Raises:
        RuntimeError: The store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=WAIT_S))
    except torch.distributed.DistStoreError:
        return None
    return json.loads(store.get(key))


def told(error: BaseException) -> str:
    """An error of the transfer in a line."""
    return f"{type(error).__name__}: {first_line(error)}"
