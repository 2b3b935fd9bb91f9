"""Real workers as threads, with samplers that a function writes for."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from mmrl.cluster import guard
from mmrl.cluster.ranks import RankLocation
from mmrl.cluster.worker import RankWorker
from mmrl.engine_api import SamplingRequest
from mmrl.types import EncodedPrompt, Prompt, RolloutGroup
from tests.scripted_sampler import ScriptedSampler


def write(request: SamplingRequest) -> list[int]:
    """Between one and eight tokens that depend on the request alone."""
    rng = np.random.default_rng([request.seed, len(request.token_ids)])
    return rng.integers(0, 99, rng.integers(1, 9)).tolist()


class LockStep(ScriptedSampler):
    """Its step needs those of the set's other ranks, as tensor-parallel ranks do; ``pause`` makes each take time."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(write)
        self.barrier, self.pause, self.steps = barrier, 0.0, 0

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        self.barrier.wait(20)
        time.sleep(self.pause)
        self.steps += 1
        return super()._advance()


class Engine:
    """As much of ``RankEngine`` as samples."""

    def __init__(self, sampler: LockStep) -> None:
        self.sampler = sampler

    def span(self, name: str) -> Any:
        return nullcontext()

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[LockStep]:
        yield self.sampler
        self.sampler.leave()


class ScriptedRanks:
    """Implements ``Ranks``: calls and answers go through pickle, as to a process."""

    def __init__(self, nodes: Sequence[str], size: int) -> None:
        self.names = [f"rank {rank}" for rank in range(len(nodes))]
        self.locations = [RankLocation(node, f"host-{node}", "127.0.0.1", guard.Process.own()) for node in nodes]
        barriers = [threading.Barrier(size) for _ in range(len(nodes) // size)]
        self.samplers = [LockStep(barriers[rank // size]) for rank in range(len(nodes))]
        self.calls: list[list[tuple[Any, ...]]] = [[] for _ in nodes]
        self.sizes: list[int] = []  # bytes of each answer
        self._threads = [ThreadPoolExecutor(1) for _ in nodes]
        self._workers = []
        for sampler in self.samplers:
            worker = object.__new__(RankWorker)  # it would prepare a process of its own
            worker._engine, worker._verb, worker._owner = Engine(sampler), ExitStack(), None  # type: ignore[assignment]
            worker.receive_images = lambda files: None  # type: ignore[method-assign]
            self._workers.append(worker)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        sent = pickle.dumps(args)
        self.calls[rank].append((method, *args))
        return self._threads[rank].submit(self._do, rank, method, sent)

    def _do(self, rank: int, method: str, sent: bytes) -> Any:
        answer = pickle.dumps(getattr(self._workers[rank], method)(*pickle.loads(sent)))
        self.sizes.append(len(answer))
        return pickle.loads(answer)

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        return

    def restart(self, ranks: Sequence[int]) -> None:
        raise AssertionError("these ranks end with their group")

    def last_words(self, rank: int) -> str:
        return ""

    def close(self, folders: Any, *, wait: bool) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)


def prompts(count: int) -> list[EncodedPrompt]:
    return [
        EncodedPrompt(
            prompt=Prompt(f"p{i}", (), columns={"large": "column"}),
            text="",
            token_ids=np.arange(3 + i, dtype=np.int32),
            images=(),
        )
        for i in range(count)
    ]
