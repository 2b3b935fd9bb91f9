"""The network interface that Gloo and NCCL use: told to both, and refused where it does not exist."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from mmrl.engine.device import DeviceKind
from mmrl.errors import ResourceError

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none has."""
    import psutil

    found = (name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own))
    return next(found, None)


def interfaces() -> list[str]:
    """The names of this machine's network interfaces."""
    import psutil

    return sorted(psutil.net_if_addrs())


def tell_interface(address: str | None) -> None:
    """Let Gloo and NCCL use the interface that has this process's address, unless the user has named one.

    They would choose by themselves otherwise: the one that the host's name resolves to, and the first that NCCL finds.
    """
    if address and (interface := interface_of(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this one, not all that begin so


def check_interfaces(environ: Mapping[str, str], existing: Sequence[str], kind: DeviceKind) -> None:
    """Raises ResourceError if Gloo or NCCL would look for an interface that is not among the existing ones.

    NCCL runs on GPUs alone.

    Gloo takes names, separated by commas. NCCL takes beginnings of names, or names after ``=``, and those to leave out
    after ``^``.
    """
    for name in filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in existing:
            raise _unknown("GLOO_SOCKET_IFNAME", name, existing)
    wanted = environ.get("NCCL_SOCKET_IFNAME", "") if kind == "cuda" else ""
    if not wanted or wanted.startswith("^"):
        return
    names, whole = wanted.removeprefix("=").split(","), wanted.startswith("=")
    if not any(each == name if whole else each.startswith(name) for name in names for each in existing):
        raise _unknown("NCCL_SOCKET_IFNAME", wanted, existing)


def _unknown(variable: str, name: str, existing: Sequence[str]) -> ResourceError:
    return ResourceError(
        f"{variable} names a network interface that {socket.gethostname()} does not have: {name}",
        where=f"the environment of a rank on {socket.gethostname()}",
        possible=", ".join(existing),
        remedy=f"correct {variable}, or unset it: mmrl finds the interface of the node's address by itself; a cluster "
        "that was started with it has to be started again",
    )
