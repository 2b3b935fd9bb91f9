"""Ranks as plain processes of this machine, in place of Ray's actors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

from mmrl.cluster.guard import Process
from mmrl.cluster.ranks import RankLocation
from mmrl.config.sections import ClusterConfig


def serve(pipe: Any, environment: Mapping[str, str]) -> None:
    """Answer the driver's calls until it hangs up."""
    os.environ.update(environment)  # before torch is imported
    from mmrl.cluster.worker import RankWorker

    worker = RankWorker()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((False, error))


class ProcessRanks:
    """Implements ``cluster.ranks.Ranks``; to take the place of ``RayRanks``.

    Args:
        environments: Variables of each rank's process, beside those of this one.
    """

    def __init__(self, config: ClusterConfig, environments: Sequence[Mapping[str, str]] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self.locations = [RankLocation("node", "host", "127.0.0.1", Process.own()) for _ in range(config.ranks)]
        self._threads = [ThreadPoolExecutor(1) for _ in self.locations]
        self._pipes, self._children = [], []
        for _, environment in zip_longest(self.locations, environments[: config.ranks], fillvalue={}):
            here, there = context.Pipe()
            self._children.append(context.Process(target=serve, args=(there, environment), daemon=True))
            self._children[-1].start()
            there.close()
            self._pipes.append(here)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._threads[rank].submit(self._ask, rank, method, args)

    def _ask(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        self._pipes[rank].send((method, args))
        is_answer, found = self._pipes[rank].recv()
        if not is_answer:
            raise found
        return found

    def watch(self, lost: Callable[[int], None]) -> None:
        return

    def last_words(self, rank: int) -> str:
        return ""

    def close(self, folders: Any, *, wait: bool) -> None:
        for child in self._children:
            child.kill()
            child.join()
