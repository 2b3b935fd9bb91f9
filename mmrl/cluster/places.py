"""Objects in processes of their own on the nodes of a Ray cluster, each with devices of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mmrl.cluster.nodes import holds, probe_file
from mmrl.cluster.ray_cluster import alive, connect, disconnect, on_node
from mmrl.config.cluster import ClusterConfig
from mmrl.errors import ResourceError

WAIT_S = 60
_THREADS = 4
"""Calls of an object that may go on at once: one that waits, and some that end it."""


class Host:
    """The process of an object. The object's calls run in threads.

    Args:
        make: Makes the object; it is pickled by name, or with its arguments.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._object = make()

    def name(self) -> str:
        """The node's name."""
        return socket.gethostname()

    def call(self, method: str, *args: Any) -> Any:
        """The answer of one of the object's methods."""
        return getattr(self._object, method)(*args)


class Places:
    """A cluster whose devices are lent to objects.

    Args:
        address: An existing cluster, or None for one of this process alone.
        num_cpus: The CPUs that one of this process alone has at least.

    Attributes:
        kind: ``GPU`` if the cluster has any, else ``CPU``: an object's devices.

    Raises:
        ResourceError: No cluster answers.
    """

    def __init__(self, address: str | None, num_cpus: int) -> None:
        ray = connect(ClusterConfig(name="ray", ranks=num_cpus, address=address))
        self.kind = "GPU" if ray.cluster_resources().get("GPU", 0) else "CPU"

    def devices(self) -> dict[str, int]:
        """The devices of each node, by its name."""
        return {
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": int(node["Resources"].get(self.kind, 0))
            for node in alive().values()
        }

    def check_folder(self, folder: Path) -> None:
        """Check that all nodes see a folder and the working folder.

        Raises:
            ResourceError: Names a node that does not.
        """
        for place in (folder, Path.cwd()):
            with probe_file(place) as probe:
                for node, facts in alive().items():
                    if not on_node(node, holds, *probe).future().result(timeout=WAIT_S):
                        raise ResourceError(
                            f"node {facts['NodeManagerHostname']} does not see {place.absolute()}",
                            where="--address",
                            remedy="name a folder on a file system that all nodes share, and start the command in one",
                        )

    def start(self, make: Callable[[], Any], devices: int) -> Place:
        """Have an object made where there are so many free devices, as soon as there are."""
        import ray

        amount = {"num_gpus": devices, "num_cpus": 0} if self.kind == "GPU" else {"num_gpus": 0, "num_cpus": devices}
        actor = ray.remote(Host).options(**amount, max_concurrency=_THREADS, max_restarts=0).remote(make)
        return Place(actor)

    def close(self) -> None:
        """Leave the cluster, and end it if it is this process's own; objects end with it."""
        disconnect()


class Place:
    """An object in a process of a cluster.

    Attributes:
        host: The name of its node, once it is there.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.host: Future[str] = actor.name.remote().future()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """The answer of one of the object's methods; it is an error if the process is lost."""
        answer: Future[Any] = self._actor.call.remote(method, *args).future()
        return answer

    def close(self) -> None:
        """End the process."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)
