"""Ranks as plain processes of this machine, in place of Ray's actors: fresh ones, or forks of a warm template."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmrl.cluster import ray_ranks
from mmrl.cluster.failures import DeadRankError
from mmrl.cluster.guard import Process, watch
from mmrl.cluster.process import host_meeting
from mmrl.cluster.ranks import RankLocation, rank_names, verb_of
from mmrl.config.cluster import ClusterConfig
from mmrl.engine import device
from mmrl.errors import MMRLError
from mmrl.system import failpoints
from mmrl.system.worker_process import python
from tests.warm_workers import ROOT, Template

KILL_AT = Path("kill_at")
"""A file of the working folder that names a point of the code, a number and a marker: see ``KillAt``."""


class RankProcess:
    """A process that answers calls of its ``RankWorker``, and of functions that it can import.

    Args:
        environment: Its variables beside those of this process.
        template: The process of which it is a fork; None for a fresh interpreter.
    """

    def __init__(self, environment: Mapping[str, str], template: Template | None = None) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            if template is None:
                context = multiprocessing.get_context("spawn")
                child = context.Process(target=answer, args=(theirs, environment), daemon=True)
                child.start()
                assert child.pid is not None
                self.pid, self._wait = child.pid, child.join
            else:
                module, *path = python(__name__)[3:]
                variables = {**os.environ, **environment}
                request = {"module": module, "path": [ROOT, *path], "environment": variables, "folder": os.getcwd()}
                self.pid = template.start(request, [theirs.fileno(), 1, 2])
                self._wait = partial(os.waitpid, self.pid, 0)  # type: ignore[assignment]

    def ask(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """The worker's answer, or ``method(worker, *args)``.

        Raises:
            EOFError: The process is gone.
            MMRLError: As the worker raised it.
            RuntimeError: It raised something else, whose traceback this is.
        """
        try:
            self._pipe.send_bytes(pickle.dumps((method, args)))
            is_answer, found = pickle.loads(self._pipe.recv_bytes())
        except OSError as error:
            raise EOFError from error
        if not is_answer:
            raise found
        return found

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._wait()
        self._pipe.close()


class ProcessRanks:
    """Implements ``cluster.ranks.Ranks``; to take the place of ``RayRanks``.

    Args:
        environments: Variables of each rank's process, beside those of this one.
        template: As for ``RankProcess``.
    """

    def __init__(
        self, config: ClusterConfig, environments: Sequence[Mapping[str, str]] = (), template: Template | None = None
    ) -> None:
        count, self._template = config.num_ranks, template
        self._environments = [*environments[:count], *({} for _ in range(count - len(environments)))]
        self.names = rank_names(config)
        self.processes = [RankProcess(environment, template) for environment in self._environments]
        self._threads = [ThreadPoolExecutor(1) for _ in self.processes]
        self._closing = threading.Event()
        self.locations = [each.result() for each in map(self._located, range(count))]

    def call(self, rank: int, method: str | Callable[..., Any], *args: Any) -> Future[Any]:
        """As the protocol has it; ``method`` may be a function of the worker, too."""
        return self._threads[rank].submit(self._ask, rank, method, args)

    def _ask(self, rank: int, method: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return self.processes[rank].ask(method, *args)
        except EOFError:
            doing, name = verb_of(str(method)), self.names[rank]
            raise DeadRankError(rank, "host", doing, "its process has ended", name=name) from None
        except MMRLError as error:
            error.where = f"{error.where} ({self.names[rank]})".strip()
            raise
        except RuntimeError as error:
            raise RuntimeError(f"{self.names[rank]} failed:\n{error}") from None

    def _located(self, rank: int) -> Future[RankLocation]:
        def locate() -> RankLocation:
            return RankLocation("node", "host", "127.0.0.1", self._ask(rank, located, ()))

        return self._threads[rank].submit(locate)

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        own = {rank: self.locations[rank].process for rank in (ranks or range(len(self.locations)))}

        def look() -> None:
            death = watch(own)
            if not self._closing.is_set():
                lost(death.rank)

        threading.Thread(target=look, daemon=True).start()

    def restart(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()
            self._threads[rank].shutdown(wait=False)
            self.processes[rank] = RankProcess(self._environments[rank], self._template)
            self._threads[rank] = ThreadPoolExecutor(1)
        for rank in ranks:
            self.locations[rank] = self._located(rank).result()

    def last_words(self, rank: int) -> str:
        return ""

    def close(self, folders: Any, *, wait: bool) -> None:
        self._closing.set()
        for process in self.processes:
            process.kill()


def run_together(count: int, template: Template, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The answers of ``function(worker, *args)`` in so many forks that find each other as torch's ranks.

    All are ended as soon as one of them raises an error.
    """
    bound = socket.create_server(("127.0.0.1", 0))
    port, meeting = bound.getsockname()[1], host_meeting(bound)
    places = [
        device.rank_variables("cpu", rank=rank, node_rank=rank, world_size=count, address="127.0.0.1", port=port)
        for rank in range(count)
    ]
    processes = [RankProcess(place | {"GLOO_SOCKET_IFNAME": "lo"}, template) for place in places]
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(process.ask, function, *args) for process in processes]
        ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for process in processes:
            process.kill()
    del meeting  # ranks met there
    failed = [future for future in ended if future.exception()]
    return [future.result() for future in failed or futures]


@contextmanager
def ranks_forked_from(template: Template) -> Iterator[None]:
    """Make the ranks of a cluster forks of a template, without Ray."""
    before = ray_ranks.RayRanks
    ray_ranks.RayRanks = partial(ProcessRanks, template=template)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        ray_ranks.RayRanks = before  # type: ignore[misc]


def on_each(group: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The answers of ``function(worker, *args)`` on each rank of a group, which may work together."""
    ranks: ProcessRanks = group._ranks
    return [future.result() for future in [ranks.call(rank, function, *args) for rank in range(len(ranks.processes))]]


# In the rank


def located(_: Any) -> Process:
    return Process.own()


def serve() -> None:
    """Be a rank, in a fork of a template; its pipe is the standard input."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    pipe = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer(pipe, {})
    os._exit(0)  # the template's libraries have nothing to finish here


class KillAt:
    """Kills this process, and no later one, when it reaches a point of the code for the n-th time.

    Args:
        marker: A file that says that it is done.
    """

    def __init__(self, point: str, count: str, marker: str) -> None:
        self._point, self._left, self._marker = point, int(count), Path(marker)

    def __call__(self, point: str) -> None:
        self._left -= point == self._point
        if point == self._point and self._left == 0 and not self._marker.exists():
            self._marker.write_text(point)
            os.kill(os.getpid(), signal.SIGKILL)


def answer(pipe: Any, environment: Mapping[str, str]) -> None:
    """Answer the driver's calls until it hangs up."""
    os.environ.update(environment)  # before torch is imported
    from mmrl.cluster.worker import RankWorker

    worker = RankWorker()
    if KILL_AT.exists():
        failpoints.inject = KillAt(*KILL_AT.read_text().split())
    while True:
        try:
            method, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        reply: tuple[bool, Any]
        try:
            reply = True, (getattr(worker, method)(*args) if isinstance(method, str) else method(worker, *args))
        except MMRLError as error:
            reply = False, error
        except Exception:
            reply = False, RuntimeError(traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))
