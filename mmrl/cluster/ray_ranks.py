"""Ranks as Ray actors: one process each, with a device of its own, on one node or many."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from mmrl.cluster.failures import LESS_MEMORY, LOOK, DeadRankError
from mmrl.cluster.guard import OOM_S, Death, Process, clear, watch
from mmrl.cluster.ranks import RankLocation, rank_names, verb_of
from mmrl.cluster.ray_cluster import alive, connect, disconnect, on_node
from mmrl.cluster.worker import RankWorker
from mmrl.config.cluster import ClusterConfig
from mmrl.errors import MMRLError, ResourceError, plural

WAIT_S = 60
"""Seconds for a cluster to answer, to reserve devices for the ranks, and to remove the files that they were sent."""
CLOSE_S = 10
"""Seconds for ranks to end by themselves."""
START_S = 300
"""Seconds for the ranks' processes to import torch."""
CLEAR_S = 10
"""Seconds for the nodes to end the ranks that are left."""
CAUSE_S = 2
"""Seconds for Ray, and for a rank's node, to say why the rank's process ended."""
_COLOUR = re.compile("\033" + r"\[[0-9;]*m")


class RayWorker(RankWorker):
    """A worker that knows where it is in the Ray cluster."""

    def location(self) -> tuple[RankLocation, list[str]]:
        """This worker's location, and its GPUs there."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        location = RankLocation(context.get_node_id(), socket.gethostname(), address, Process.own())
        return location, [str(gpu) for gpu in ray.get_gpu_ids()]


class RayRanks:
    """Implements ``ranks.Ranks``.

    Neighbouring ranks are on one node as far as they fit, beginning with the driver's.

    Raises:
        ResourceError: No cluster answers, or it has too few devices.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        ray = connect(cluster)
        try:
            self._reservation = _reserve(cluster)
            actors = [_actor(self._reservation, index) for index in range(cluster.num_ranks)]
            found = [_result(number, actor.location.remote()) for number, actor in enumerate(actors)]
        except BaseException:
            disconnect()
            raise
        here = ray.get_runtime_context().get_node_id()

        def neighbourhood(index: int) -> tuple[bool, str, str, list[str]]:
            location, gpus = found[index]
            return location.node != here, location.address, location.node, gpus

        self._bundles = sorted(range(cluster.num_ranks), key=neighbourhood)
        self._actors = [actors[i] for i in self._bundles]
        self.locations: list[RankLocation] = [found[i][0] for i in self._bundles]
        self.names = rank_names(cluster)
        self._guards: dict[int, Future[Death]] = {}  # that watches the rank
        self._closing = threading.Event()

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            try:
                error = done.exception()
                if error is None:
                    answer.set_result(done.result())
                else:
                    host, name = self.locations[rank].host, self.names[rank]
                    answer.set_exception(_explained(rank, error, host, verb_of(method), name))
            except BaseException as fault:  # a call without an answer would be waited for for ever
                answer.set_exception(fault)

        getattr(self._actors[rank], method).remote(*args).future().add_done_callback(pass_on)
        return answer

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        watched = range(len(self.locations)) if ranks is None else ranks
        for node in {self.locations[rank].node for rank in watched}:
            here = {rank: self.locations[rank].process for rank in watched if self.locations[rank].node == node}
            guard: Future[Death] = on_node(node, watch, here).future()
            self._guards |= dict.fromkeys(here, guard)
            # Whoever waits for the rank may be told more.
            timer = threading.Timer(CAUSE_S, self._report, [node, guard, min(here), lost])
            timer.daemon = True
            guard.add_done_callback(partial(_start, timer))

    def restart(self, ranks: Sequence[int]) -> None:
        import ray

        nodes = {self.locations[rank].node for rank in ranks}
        if gone := [each.host for each in self.locations if each.node in nodes - alive().keys()]:
            raise ResourceError(f"node {gone[0]} is gone, and its devices with it", where="cluster")
        for rank in ranks:
            with contextlib.suppress(Exception):
                ray.kill(self._actors[rank])
        own = {n: [self.locations[rank].process for rank in ranks if self.locations[rank].node == n] for n in nodes}
        _wait([on_node(node, clear, processes, "") for node, processes in own.items()], CLEAR_S)  # devices are free
        for rank in ranks:
            self._actors[rank] = _actor(self._reservation, self._bundles[rank])
        for rank in ranks:
            self.locations[rank], _ = _result(rank, self._actors[rank].location.remote(), self.names[rank])

    def _report(self, node: str, guard: Future[Death], first: int, lost: Callable[[int], None]) -> None:
        """Called when the guard of a node has ended: a rank or the node has ended, or the guard alone was killed."""
        if self._closing.is_set():
            return
        if guard.exception() is None:
            lost(guard.result().rank)
        elif node not in alive():
            lost(first)

    def last_words(self, rank: int) -> str:
        location = self.locations[rank]
        try:
            kills = self._guards[rank].result(timeout=CAUSE_S).oom_kills
        except Exception:  # it has seen nothing, or has gone with its node
            return ""
        ended = f"the kernel ended {kills} process{'es' * (kills > 1)} for want of memory"
        return f"{ended} on {location.host} in the {OOM_S} s before" if kills else ""

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        import ray

        self._closing.set()
        with contextlib.suppress(Exception):
            if wait:
                _wait([actor.__ray_terminate__.remote() for actor in self._actors], CLOSE_S)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._reservation)
        with contextlib.suppress(Exception):
            processes = {
                node: [p.process for p in self.locations if p.node == node]
                for node in alive().keys() & {self.locations[rank].node for rank in self._guards}
            }
            _wait([on_node(node, clear, own, folders.get(node, "")) for node, own in processes.items()], CLEAR_S)
        disconnect()


def _reserve(cluster: ClusterConfig) -> Any:
    """A placement group with one bundle per rank: a GPU if the cluster has any, else a CPU."""
    import ray
    from ray.util.placement_group import placement_group

    kind = "GPU" if ray.cluster_resources().get("GPU", 0) else "CPU"
    group = placement_group([{kind: 1}] * cluster.num_ranks, strategy="PACK")
    enough = ray.cluster_resources().get(kind, 0) >= cluster.num_ranks
    if not group.wait(WAIT_S if enough or cluster.address else 1):
        raise too_few_devices(cluster, kind, _table(kind))
    return group


def too_few_devices(cluster: ClusterConfig, kind: str, table: str) -> ResourceError:
    """The refusal of a cluster that has too few devices.

    Args:
        kind: ``GPU`` or ``CPU``.
        table: The devices of each node.
    """
    remedy = f"lower {cluster.ranks_keys}, end what holds the devices, or name a larger cluster in cluster.address"
    if cluster.is_split:
        remedy += "; cluster.ranks in their place has ranks that sample and learn in turns on one device each"
    return ResourceError(
        f"{plural(cluster.num_ranks, 'rank')}, each with a {kind} of its own: the cluster does not give them",
        where=cluster.ranks_keys,
        possible=f"\n{table}",
        remedy=remedy,
    )


def _start(timer: threading.Timer, _: Future[Death]) -> None:
    timer.start()


def _actor(reservation: Any, index: int) -> Any:
    """A worker in a process of its own, on the devices of a bundle."""
    import ray

    return ray.remote(RayWorker).options(**_bundle_options(reservation, index)).remote()


def _bundle_options(reservation: Any, index: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    (kind,) = reservation.bundle_specs[index]
    return {
        "num_cpus": int(kind == "CPU"),
        "num_gpus": int(kind == "GPU"),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=index),
    }


def _wait(references: Sequence[Any], seconds: float) -> None:
    import ray

    if references:
        ray.wait(references, num_returns=len(references), timeout=seconds)


def _table(kind: str) -> str:
    """Each node's amount of a resource, and how much of it is free in all."""
    import ray

    rows = []
    for node in ray.nodes():
        has = f"{node['Resources'].get(kind, 0):g} {kind}s" if node["Alive"] else "is gone"
        rows.append(f"    {node['NodeManagerHostname']} ({node['NodeManagerAddress']}): {has}")
    return "\n".join([*rows, f"    free: {ray.available_resources().get(kind, 0):g}"])


def _result(rank: int, reference: Any, name: str = "") -> Any:
    try:
        return reference.future().result(timeout=START_S)
    except TimeoutError:
        raise ResourceError(
            f"{name or f'rank {rank}'} has not started within {START_S} s",
            where="cluster",
            remedy="look at its node: `ray status`, and Ray's logs, usually /tmp/ray/session_latest/logs",
        ) from None
    except Exception as error:
        raise _explained(rank, error, "its node", "start", name or f"rank {rank}") from None


def _explained(rank: int, error: BaseException, host: str, doing: str, name: str) -> BaseException:
    """The error that a rank raised in a call, with the rank's name."""
    from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

    if isinstance(error, RayTaskError) and isinstance(error.cause, MMRLError):
        cause = error.cause
        cause.where = f"{cause.where} ({name})".strip()
        return cause
    message = _COLOUR.sub("", str(error))
    if isinstance(error, RayTaskError):
        return RuntimeError(f"{name} failed:\n{message}")
    if isinstance(error, RayError):
        remedy = LESS_MEMORY if isinstance(error, OutOfMemoryError) else LOOK
        return DeadRankError(rank, host, doing, _reason(message), remedy, name=name)
    return error


def _reason(message: str) -> str:
    """Ray's account of a process's end without its list of common causes, or the error of the process's start."""
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", message, re.DOTALL)
    if found:
        return " ".join(found.group(1).split())[:300]
    return " ".join(message.split())[-300:] if "creation task" in message else " ".join(message.split())[:300]
