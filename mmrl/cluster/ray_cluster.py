"""The connection to a Ray cluster, and its nodes."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mmrl.config.cluster import ClusterConfig
from mmrl.errors import ResourceError
from mmrl.system.signals import handlers_kept

WAIT_S = 60
"""Seconds for a node's answer."""
KNOCK_S = 10
"""Seconds for an address to answer."""
CLUSTER_S = 40
"""Seconds for Ray to find a cluster by itself and to connect."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Environment variables, unless the user has set them: no statistics are sent, nothing is said about CPU actors, and
the ranks of a cluster that starts here have the priority of other processes (Ray would start them at niceness 15)."""
T = TypeVar("T")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a gRPC client: HTTP/2's preface and empty settings (RFC 9113, section 3.4)."""
SETTINGS_FRAME = bytes([4])
"""The type of the frame with which its server answers first."""


def connect(cluster: ClusterConfig) -> Any:
    """Ray, connected; without an address in the config to a cluster of this process alone, despite RAY_ADDRESS."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not cluster.address:  # Ray would listen on every interface; it reads this when it is imported, on Linux too
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise ResourceError(
            "Ray is not installed", where="cluster.name: ray", remedy="pip install 'mmrl-train[ray]'"
        ) from error
    # Ranks with a device need no CPU to themselves; a machine with fewer cores than ranks is only slow.
    own = {} if cluster.address else {"num_cpus": max(os.cpu_count() or 1, cluster.num_ranks)}
    try:
        if cluster.address:
            _knock(cluster.address)
        with handlers_kept():
            ray.init(
                address=cluster.address or "local",
                include_dashboard=False if not cluster.address else None,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                **own,
            )
    except Exception as error:
        raise ResourceError(
            f"Ray cannot be started or reached: {' '.join(str(error).split())[:300]}",
            where=f"cluster.address: {cluster.address or 'null'}",
            possible="null for a cluster of this run alone, auto, or HOST:PORT of `ray start --head` with the same "
            "versions of Ray and Python",
            remedy="check it with `ray status`; a cluster with tokens needs RAY_AUTH_MODE=token and its token here",
        ) from error
    return ray


def disconnect() -> None:
    """Leave the cluster, and end it if it is this process's own."""
    import ray

    with handlers_kept():
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises an error unless Ray, or another server of gRPC, is at the address; Ray itself would try for minutes."""
    if address == "auto":
        _resolve(address)
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError("the address is not HOST:PORT")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # over TLS a server understands no plain bytes
            connection.sendall(PREFACE)
            if connection.recv(9)[3:4] != SETTINGS_FRAME:
                raise ConnectionError("what listens there is not Ray")


def _resolve(address: str) -> None:
    """Let another process, which can be ended, look for the cluster and connect."""
    command = [sys.executable, "-c", "import ray, sys; ray.init(sys.argv[1], logging_level=50)", address]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no cluster has answered within {CLUSTER_S} s") from None
    if found.returncode:
        raise ConnectionError(found.stderr.strip().rpartition("\n")[2])


def alive() -> dict[str, Any]:
    """The cluster's nodes that are there, by id."""
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def on_node(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a node, beside its ranks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    return task.remote(*args)


def on_every_node(cluster: ClusterConfig, function: Callable[..., T], *args: Any) -> list[T]:
    """The answer of ``function(node id, number of GPUs, *args)`` on each node of a cluster."""
    connect(cluster)
    try:
        nodes = alive().items()
        answers = [on_node(name, function, name, int(node["Resources"].get("GPU", 0)), *args) for name, node in nodes]
        return [answer.future().result(timeout=WAIT_S) for answer in answers]
    finally:
        disconnect()
