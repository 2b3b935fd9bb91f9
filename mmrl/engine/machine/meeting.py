"""The group of all ranks: they meet at rank 0's store, join, and see at once that they reach each other."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.machine.full_device import out_of_memory
from mmrl.engine.machine.interfaces import VARIABLES, interfaces
from mmrl.engine.machine.start_errors import UNREACHED, known, words_of
from mmrl.errors import ResourceError, first_line

WAIT = timedelta(hours=1)
"""Time that ranks wait for each other in the group of all ranks: rank 0 alone reads the weights, and each rank writes
files of a checkpoint, which takes minutes with a slow disk. DeepSpeed's group has torch's default, 10 minutes with
NCCL, so ranks wait for a disk in this group only."""
COME_S = 300.0
"""Seconds in which every rank has to come to the store; they import their packages before."""
REACH_S = 60.0
"""Seconds in which the first sum over all ranks has to be there. It makes the connections; with a wrong interface it
would hang for as long as ``WAIT``."""


def join_group(kind: device.DeviceKind, *, come_s: float = COME_S, reach_s: float = REACH_S) -> None:
    """Make this process a member of the group of all ranks; nothing happens if it is one.

    Raises:
        ResourceError: A rank does not come, or is not reached.
    """
    if torch.distributed.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        if world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # see process.host_meeting
            await_ranks(int(os.environ["RANK"]), world_size, come_s)
        torch.distributed.init_process_group(device.process_group_backend(kind), timeout=WAIT)
    except torch.distributed.DistError as error:
        raise _not_found(first_line(error)) from error
    if world_size > 1:
        reach_ranks(device.torch_device(kind), reach_s)


def await_ranks(rank: int, world_size: int, seconds: float) -> None:
    """Return when all ranks have come to the store.

    Raises:
        ResourceError: Names those that have not.
    """
    patience = timedelta(seconds=seconds)
    store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience
    )
    keys = [f"mmrl/rank {number}" for number in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, patience)
    except torch.distributed.DistError as error:
        absent = [key.removeprefix("mmrl/") for key in keys if not store.check([key])]
        raise _not_found(f"{', '.join(absent)} did not come within {seconds:g} s") from error


def reach_ranks(torch_device: str, seconds: float) -> None:
    """Sum a number over all ranks; a thread does it, since a connection that is being made cannot be given up.

    Raises:
        ResourceError: The sum is not there in time, or the backend has failed.
    """
    errors = list[BaseException]()

    def add() -> None:
        try:
            one = torch.ones(1, device=torch_device)
            torch.distributed.all_reduce(one)
            one.item()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive() and not errors:
        return
    if errors and isinstance(errors[0], RuntimeError) and device.is_out_of_memory(errors[0]):
        raise out_of_memory("the start of the learner", first_line(errors[0])) from errors[0]
    if errors and (row := known(errors[0])) and row.meaning != UNREACHED:
        raise row.error(f"the ranks cannot work together: {row.meaning}: {words_of(errors[0])}", remedy=row.remedy)
    reason = words_of(errors[0]) if errors else f"no answer within {seconds:g} s"
    backend = torch.distributed.get_backend()
    used = ", ".join(f"{name}={os.environ.get(name) or 'not set'}" for name in VARIABLES)
    raise ResourceError(
        f"the ranks have met and do not reach each other over {backend}: {reason}",
        where=f"{socket.gethostname()}: {used}",
        possible=", ".join(interfaces()),
        remedy="set both variables on every node, before Ray starts there, to the interface of the network between "
        "the nodes; open its ports; NCCL_DEBUG=INFO tells what NCCL tries",
    ) from (errors[0] if errors else None)


def _not_found(reason: str) -> ResourceError:
    return ResourceError(
        f"the ranks do not find each other: {reason}",
        where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        remedy="start again if the port was taken; see that nodes reach each other (`mmrl doctor CONFIG`)",
    )
