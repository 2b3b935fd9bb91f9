"""The machines on which the runs of a sweep are at work: this one with one run at a time, or a Ray cluster's."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.commands.child_command import ChildCommand, Ended
from mmrl.errors import ResourceError, first_line, plural

if TYPE_CHECKING:
    from mmrl.cluster.places import Place, Places


@dataclass(frozen=True, slots=True)
class Errand:
    """The run of a point, for the process that starts it, on whatever node.

    Attributes:
        request: The task's arguments.
        log: The file to which the run's console is appended.
        devices: Devices of its own.
        reserves: True if it reserves them by itself, in a cluster.
        folder: Its working folder.
        module: The module whose ``serve`` its process calls.
    """

    request: dict[str, Any]
    log: Path
    devices: int
    reserves: bool
    folder: str
    module: str


class PointProcess:
    """The process of a point's run, beside which it is made."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._command: ChildCommand | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self) -> Ended:
        """Start the process, and wait for its end."""
        errand = self._errand
        with self._lock:
            if self._is_stopped:
                return Ended(10, "stopped before it began")
            try:
                where = errand.request["config"]["trainer"]["run_dir"]
                self._command = ChildCommand(
                    "train", errand.request, where, errand.log, folder=errand.folder, module=errand.module
                )
            except ResourceError as error:
                return Ended(error.exit_code, str(error))
        return self._command.wait_for_end()

    def interrupt(self) -> None:
        """End it as Ctrl-C does."""
        with self._lock:
            self._is_stopped = True
            if self._command is not None:
                self._command.interrupt()

    def stop(self, why: str) -> None:
        """End it where nothing is lost, with exit code 10."""
        with self._lock:
            self._is_stopped = True
            if self._command is not None:
                self._command.stop(why)


class PlacedRun(ABC):
    """A point's run that was given to a place."""

    @property
    @abstractmethod
    def host(self) -> str | None:
        """The name of its machine once it has its devices; empty for this one."""

    @property
    @abstractmethod
    def ended(self) -> Ended | None:
        """Its end; None before."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> object:
        """Call ``interrupt`` or ``stop`` of its process."""

    @abstractmethod
    def close(self) -> None:
        """Let its place be free."""


class LocalRun(PlacedRun):
    """A run beside this process."""

    host = ""

    def __init__(self, errand: Errand) -> None:
        self._process = PointProcess(errand)
        self._ended: list[Ended] = []
        threading.Thread(target=lambda: self._ended.append(self._process.run()), daemon=True).start()

    @property
    def ended(self) -> Ended | None:
        return self._ended[0] if self._ended else None

    def call(self, method: str, *args: Any) -> object:
        return getattr(self._process, method)(*args)

    def close(self) -> None:
        return None


class RayRun(PlacedRun):
    """A run in a place of a cluster, from when there is one.

    Args:
        tells_host: True if the cluster has several nodes.
    """

    def __init__(self, place: Place, *, tells_host: bool) -> None:
        self._place, self._tells_host = place, tells_host
        self._answer: Future[Ended] = place.call("run")

    @property
    def host(self) -> str | None:
        found = self._place.host
        if not found.done() or found.exception() is not None:
            return None
        return found.result() if self._tells_host else ""

    @property
    def ended(self) -> Ended | None:
        if not self._answer.done():
            return None
        if (error := self._answer.exception()) is not None:
            return Ended(ResourceError.exit_code, f"the process beside the run was lost: {first_line(error)}")
        return self._answer.result()

    def call(self, method: str, *args: Any) -> object:
        return self._place.call(method, *args)

    def close(self) -> None:
        self._place.close()


class Machine:
    """This machine, with one run at a time."""

    most = 1

    def start(self, errand: Errand) -> PlacedRun | None:
        """The run; None if there is no room for it now."""
        return LocalRun(errand)

    def lines(self) -> list[str]:
        return ["1 run at a time on this machine"]

    def close(self) -> None:
        return None


class Cluster(Machine):
    """A Ray cluster, with several runs at once.

    Args:
        address: An existing cluster; None for one on this machine.
        most: Runs at once.
        errands: All that may come.
        folder: The sweep's.

    Raises:
        ResourceError: No cluster answers, a node does not see the folder, or a run needs more devices than there are.
    """

    def __init__(self, address: str | None, most: int, errands: list[Errand], folder: Path) -> None:
        from mmrl.cluster.places import Places

        largest = max((errand.devices for errand in errands), default=1)
        self.most = most
        self._places: Places = Places(address, most * largest)
        try:
            self._nodes = self._places.devices()
            self._check(errands)
            if address is not None:
                self._places.check_folder(folder)
        except BaseException:
            self._places.close()
            raise
        self._at_work: list[tuple[PlacedRun, int]] = []

    def _check(self, errands: list[Errand]) -> None:
        kind, nodes = self._places.kind, self._nodes
        for errand in errands:
            room = sum(nodes.values()) if errand.reserves else max(nodes.values(), default=0)
            if errand.devices > room:
                raise ResourceError(
                    f"a run has {plural(errand.devices, 'rank')}, each with a {kind} of its own, and "
                    f"{'the cluster' if errand.reserves else 'no node'} has so many",
                    where="cluster.ranks",
                    possible=", ".join(f"{name}: {count} {kind}s" for name, count in nodes.items()),
                    remedy="lower cluster.ranks, or name a cluster with more devices in --address",
                )

    def start(self, errand: Errand) -> PlacedRun | None:
        """The run, which waits for its devices; None if it reserves them by itself and they are not free."""
        self._at_work = [(run, devices) for run, devices in self._at_work if run.ended is None]
        taken = sum(devices for _, devices in self._at_work)
        if errand.reserves and taken + errand.devices > sum(self._nodes.values()):
            return None
        make = functools.partial(PointProcess, errand)
        place = self._places.start(make, 0 if errand.reserves else errand.devices)
        run = RayRun(place, tells_host=len(self._nodes) > 1)
        self._at_work.append((run, errand.devices))
        return run

    def lines(self) -> list[str]:
        kind = self._places.kind
        return [
            f"{self.most} runs at once through Ray",
            *(f"{name}: {plural(count, kind)}" for name, count in self._nodes.items()),
        ]

    def close(self) -> None:
        self._places.close()
