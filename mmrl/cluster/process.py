"""What a process sets before the engines' packages are imported; imports none of them itself."""

from __future__ import annotations

import os
import socket
import warnings

from mmrl.engine import device


def prepare_process() -> device.DeviceKind:
    """Set what torch, transformers, vLLM and DeepSpeed read when they are imported; tell the device.

    Their notices stay off the console.
    """
    for name, value in (device.WAITING | device.QUIET).items():
        os.environ.setdefault(name, value)
    kind = device.detect()  # imports torch
    os.environ.update(device.environment(kind))
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.simplefilter("ignore", category)
    return kind


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none has."""
    import psutil

    found = (name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own))
    return next(found, None)
