"""What a step costs the driver at real scale: `python tests/benchmarks/driver.py [--size 1/16 ...] [--json FILE]`.

Trainer, Collector, Scorer with its worker processes, credit, packing plan, group of ranks, records, ledger and metrics
are real. The eight ranks are objects in this process: each has a real ``RankWorker``, whose engine answers with random
token ids of a vocabulary of 151,936, log-probs and entropies. Calls go to them and back through pickle protocol 5 with
out-of-band buffers, which are copied into one block, as Ray does. The reward answers a member's number modulo 2.

Each size runs in a process of its own, on one core. Seconds are processor seconds of the driver, which other work on
the machine disturbs less than it does the clock; the wall clock of the same work is there too. Left out are the ranks'
own seconds (they are other processes in a run), checkpoints, and the first step, which starts the reward workers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from stopwatch import Stopwatch, peak_memory

PROMPTS, GROUP, COMPLETION, PROMPT = 512, 5, 2048, 1000
"""The full size: prompts of a step, completions of each, tokens of a completion and of a prompt."""
RANKS, VOCABULARY, CHARACTERS = 8, 151_936, 4
"""``CHARACTERS``: of a text, for each token."""
SIZES = ("1/16", "1/4", "1")
STEPS = 4
PHASES = (
    "prompts",
    "assembly",
    "scoring",
    "credit",
    "packing plan",
    "rows",
    "shipping",
    "log-prob check",
    "ledger",
    "metrics",
    "monitors",
    "records",
    "left",
)
BESIDE = {"PromptPrefetcher._fill": "prompts", "RunDirectory.write_rollouts": "records, in a thread"}
"""Methods that run in threads of their own, and the phases that they count to."""
OF_CLOCK = {
    "prompts": "prompts",
    "generate": "assembly",
    "score": "scoring",
    "credit": "credit",
    "check": "log-prob check",
    "logprob": "rows",
    "update": "rows",
    "record": "records",
}
"""The parts of a step that the trainer's clock tells apart."""


@dataclass(frozen=True)
class Parcel:
    """A pickle and its buffers, in one block, as Ray keeps them."""

    pickled: bytes
    block: bytearray
    sizes: Sequence[int]

    @classmethod
    def of(cls, value: Any) -> Parcel:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        block = bytearray(sum(each.nbytes for each in raw))
        end = 0
        for each in raw:
            start, end = end, end + each.nbytes
            block[start:end] = each
        return cls(pickled, block, [each.nbytes for each in raw])

    def open(self) -> Any:
        view, end, buffers = memoryview(self.block).toreadonly(), 0, []
        for size in self.sizes:
            start, end = end, end + size
            buffers.append(view[start:end])
        return pickle.loads(self.pickled, buffers=buffers)

    @property
    def num_bytes(self) -> int:
        return len(self.pickled) + len(self.block)


class ArrayEngine:
    """Implements ``Engine``, ``Learner`` and every ``Network`` on one rank: everything is random arrays."""

    precision = "float32"

    def __init__(self, rank: int) -> None:
        self._rng = np.random.default_rng(rank)
        self._text = "".join(map(chr, self._rng.integers(97, 123, 2 * COMPLETION * CHARACTERS)))
        self._updates = 0

    def span(self, name: str) -> Any:
        return nullcontext()

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Any]:
        from made_groups import MadeGroups

        yield MadeGroups(self._group)

    @contextmanager
    def learning(self) -> Iterator[ArrayEngine]:
        yield self

    def memory_bytes_max(self) -> int:
        return 0

    def _group(self, request: Any) -> Any:
        from mmrl.types import Rollout, RolloutGroup, Segment

        rollouts = []
        for member in range(request.num_samples):
            ids = self._rng.integers(0, VOCABULARY, COMPLETION, np.int32)
            segment = Segment(ids, True, -self._rng.standard_exponential(COMPLETION, np.float32))
            start = int(ids[0]) % len(self._text) // 2
            text = self._text[start : start + COMPLETION * CHARACTERS]
            rollouts.append(Rollout(request.prompt, (segment,), member, text, "length", self._updates))
        return RolloutGroup(request.prompt, tuple(rollouts))

    def network(self, role: str) -> ArrayEngine:
        return self

    def score(self, samples: Sequence[Any], *, way: str = "packed") -> list[Any]:
        return [sample.sampler_logprobs * np.float32(1 + 2**-22) for sample in samples]

    def update(self, rows: Sequence[Any]) -> Any:
        from mmrl.engine_api import UpdateResult

        self._updates += 1
        logprobs = self.score([row.sample for row in rows])
        entropies = [self._rng.random(len(row.mask), np.float32) for row in rows]
        return UpdateResult({"loss/policy": 0.0, "policy/grad_norm": 1.0}, logprobs, entropies)

    def save(self, folder: Path) -> Any:
        from mmrl.engine_api import NetworkFiles

        for part in ("model", "state"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        return {"policy": NetworkFiles()}


class ShippedRanks:
    """Implements ``cluster.ranks.Ranks``: each call runs at once, in this thread, on copies of what it is given."""

    def __init__(self, count: int, phase: Callable[[str], Any]) -> None:
        from mmrl.cluster.guard import Process
        from mmrl.cluster.ranks import RankLocation
        from mmrl.cluster.worker import RankWorker

        self.locations = [RankLocation("node", "host", "127.0.0.1", Process.own()) for _ in range(count)]
        self.names = [f"rank {rank}" for rank in range(count)]
        self._workers = [RankWorker() for _ in range(count)]
        for rank, worker in enumerate(self._workers):
            worker._engine = ArrayEngine(rank)  # type: ignore[assignment]
        self._phase = phase
        self.sent_bytes = self.received_bytes = 0

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            with self._phase("shipping"):
                job = Parcel.of(args)
            with self._phase("ranks"):
                found = Parcel.of(getattr(self._workers[rank], method)(*job.open()))
            self.sent_bytes += job.num_bytes
            self.received_bytes += found.num_bytes
            with self._phase("shipping"):
                answer.set_result(found.open())
        except BaseException as error:
            answer.set_exception(error)
        return answer

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        return None

    def restart(self, ranks: Sequence[int]) -> None:
        raise AssertionError("these ranks end with their group")

    def last_words(self, rank: int) -> str:
        return ""

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        return None


class ArrayEncoder:
    """Implements ``PromptEncoder``: every prompt has random tokens and one image."""

    def num_tokens(self, prompt: Any) -> int:
        return PROMPT

    def encode(self, prompt: Any) -> Any:
        from mmrl.types import EncodedPrompt, ImageRef

        number = int(prompt.id)
        ids = np.random.default_rng(number).integers(0, VOCABULARY, PROMPT, np.int32)
        image = ImageRef(f"{number:064x}", 448, 448, f"/media/{number:064x}.png")
        return EncodedPrompt(prompt=prompt, text=prompt.messages[0].content, token_ids=ids, images=(image,))

    def demonstrate(self, prompt: Any, *, all_turns: bool = False) -> Any:
        raise NotImplementedError


class Meter:
    """Processor seconds and wall clock of the driver, by phase, a step at a time."""

    def __init__(self) -> None:
        self._processor, self._wall = Stopwatch(time.thread_time), Stopwatch()
        self._beside: dict[str, float] = defaultdict(float)
        self._process_s = time.process_time()
        self._thread_s = time.thread_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._processor.phase(name), self._wall.phase(name):
            yield

    def time(self, owner: Any, method: str, name: str) -> None:
        self._processor.time(owner, method, name)
        self._wall.time(owner, method, name)

    def time_beside(self, owner: Any, method: str) -> None:
        """Count a method of ``BESIDE``."""
        original = getattr(owner, method)

        def timed(*args: Any) -> None:
            start = time.thread_time()
            original(*args)
            self._beside[BESIDE[f"{owner.__name__}.{method}"]] += time.thread_time() - start

        setattr(owner, method, timed)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Processor seconds and wall clock since the last call; scoring has the threads that drive workers."""
        found, wall = self._processor.take(), self._wall.take()
        process_s, thread_s, beside = time.process_time(), time.thread_time(), self._beside
        others_s = process_s - self._process_s - (thread_s - self._thread_s) - sum(beside.values())
        self._process_s, self._thread_s, self._beside = process_s, thread_s, defaultdict(float)
        for name, seconds in (*beside.items(), ("scoring", others_s)):
            found[name] = found.get(name, 0.0) + seconds
        found["left"] = found.pop("rest")
        return found, wall


def watch_all(meter: Meter, *, with_records: bool) -> None:
    """Note every phase; what is within another phase counts there alone."""
    from mmrl.cluster.group_learner import GroupLearner
    from mmrl.ops import metrics
    from mmrl.rollout.collector import Collector
    from mmrl.rollout.prefetch import PromptPrefetcher
    from mmrl.rollout.rewards.scorer import Scorer, Scoring
    from mmrl.runs.directory import RunDirectory
    from mmrl.runs.recorder import RunRecorder
    from mmrl.step.check import LogprobCheck
    from mmrl.step.loop import Trainer
    from mmrl.system.clock import Clock

    phase = Clock.phase

    @contextmanager
    def both(self: Clock, name: str) -> Iterator[None]:
        with meter.phase(OF_CLOCK.get(name, "left")), phase(self, name):
            yield

    Clock.phase = both  # type: ignore[method-assign]
    meter.time_beside(PromptPrefetcher, "_fill")
    meter.time_beside(RunDirectory, "write_rollouts")
    meter.time(Scorer, "submit", "scoring")
    meter.time(Scoring, "result", "scoring")
    meter.time(Collector, "batch", "assembly")
    meter.time(GroupLearner, "share", "packing plan")
    meter.time(GroupLearner, "samples", "shipping")
    meter.time(LogprobCheck, "check_step", "metrics")
    meter.time(Trainer, "_metrics", "metrics")
    meter.time(metrics, "advantage_metrics", "metrics")
    meter.time(RunRecorder, "trained", "ledger")
    meter.time(RunRecorder, "log", "metrics")
    meter.time(RunRecorder, "look", "monitors")
    meter.time(Trainer, "_save", "checkpoint")
    if not with_records:
        RunRecorder.rollouts = lambda *args: None  # type: ignore[method-assign]


def measure(size: Fraction, steps: int, folder: Path, *, with_records: bool) -> dict[str, Any]:
    """A run of one size: medians over its steps after the first."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    meter = Meter()
    watch_all(meter, with_records=with_records)
    from mmrl.step.loop import Trainer

    ranks = ShippedRanks(RANKS, meter.phase)
    prompts = int(PROMPTS * size)
    takes: list[tuple[dict[str, float], dict[str, float]]] = []
    traffic: list[tuple[int, int]] = []
    memory: list[int] = []
    train_step = Trainer.train_step

    def one_step(self: Trainer, step: int) -> dict[str, float]:
        takes.append(meter.take())  # of the step before, its checkpoint included
        traffic.append((ranks.sent_bytes, ranks.received_bytes))
        ranks.sent_bytes = ranks.received_bytes = 0
        found: dict[str, int] = {}
        with peak_memory(found):
            values = train_step(self, step)
        memory.append(found["peak"])
        return values

    Trainer.train_step = one_step  # type: ignore[method-assign]
    run(ranks, prompts, steps, folder)
    takes.append(meter.take())
    traffic.append((ranks.sent_bytes, ranks.received_bytes))
    processor, wall = zip(*takes[2:], strict=True)  # without the start and the first step
    medians = {
        name: statistics.median(each.get(name, 0.0) for each in processor) for name in (*PHASES, *BESIDE.values())
    }
    ours = [sum(seconds for name, seconds in each.items() if name not in ("ranks", "checkpoint")) for each in wall]
    return {
        "size": str(size),
        "tokens": prompts * GROUP * COMPLETION,
        "seconds": medians,
        "total_s": sum(medians[name] for name in PHASES),
        "wall_s": statistics.median(ours),
        "ranks_s": statistics.median(each.get("ranks", 0.0) for each in processor),
        "peak_bytes": max(memory),
        "sent_bytes": traffic[-1][0],
        "received_bytes": traffic[-1][1],
        "record_bytes": record_bytes(folder / "run"),
    }


def record_bytes(run: Path) -> dict[str, int]:
    """Bytes of the newest step's columns; a column of lists counts with its lengths."""
    import pyarrow.parquet as pq

    from mmrl.rollout.records import recorded_steps

    if not (files := recorded_steps(run)):
        return {}
    metadata, found = pq.ParquetFile(files[max(files)]).metadata, defaultdict[str, int](int)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema.replace(".list.element", "").removeprefix("rollouts.")
            found[name] += column.total_compressed_size
    return dict(found)


def run(ranks: ShippedRanks, prompts: int, steps: int, folder: Path) -> None:
    """Train as ``mmrl train`` does, with these ranks."""
    from transformers import Qwen2_5_VLConfig

    from mmrl.cluster.group import RankGroup
    from mmrl.config.load import from_mapping
    from mmrl.data.images import ImageGrid, MediaStore
    from mmrl.data.prompts import DatasetRows, PromptSource
    from mmrl.engine.learner.counting import UnitCost
    from mmrl.engine.network.family import FAMILIES
    from mmrl.engine.network.image_form import OneGrid
    from mmrl.plugin_host import registry
    from mmrl.rollout.collector import Collector
    from mmrl.rollout.rewards.scorer import Scorer
    from mmrl.runs.directory import RunDirectory
    from mmrl.runs.recorder import RunRecorder
    from mmrl.runs.tracking import Trackers
    from mmrl.step.loop import RunContext, Trainer
    from mmrl.system.console import Console
    from mmrl.system.profiling import Profiler
    from mmrl.system.signals import Interruption
    from mmrl.system.watchdog import Watchdog
    from mmrl.types import Message, Prompt

    reward = folder / "reward.py"
    reward.write_text("def parity(rollouts):\n    return [float(each.index % 2) for each in rollouts]\n")
    config = from_mapping(
        {
            "model": {"path": "none"},
            "data": {"train": {"name": "table"}},
            "rewards": [{"name": f"{reward}:parity"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": GROUP, "max_new_tokens": COMPLETION},
            "trainer": {"steps": steps, "prompts_per_step": prompts, "save_every": steps},
        }
    )
    text = "What is shown here? " * (PROMPT * CHARACTERS // 20)
    rows = [
        Prompt(str(i), (Message("user", text),), answer=str(i), columns={"problem": text, "answer": str(i)})
        for i in range(2 * prompts)
    ]
    encoder = ArrayEncoder()
    source = PromptSource([DatasetRows("rows", rows)], encoder, max_prompt_tokens=PROMPT)
    media = MediaStore(folder / "media", ImageGrid(28, 3136, 1_003_520))
    shape = Qwen2_5_VLConfig()
    model: Any = SimpleNamespace(config=shape, family=FAMILIES["qwen2_5_vl"], images=OneGrid(shape))
    directory = RunDirectory.create(folder / "run")
    algorithm: Any = registry.create("algorithm", config.algorithm)
    engine = RankGroup(ranks, media, UnitCost(model), ranks_together=1)
    engine.descriptions = [{"precision": "float32"}]
    with open(os.devnull, "w") as nowhere, Scorer(config.rewards) as scorer, Interruption() as interruption:
        recorder = RunRecorder(config, directory, Trackers([], print), Console(steps, nowhere), engine, {})
        collector = Collector(config, engine, scorer, recorder.progress, event=recorder.event)
        profiler = Profiler(engine, folder, 0, 0, lambda kind, message: None)
        context = RunContext(recorder, interruption, Watchdog(None, bool, print), profiler)
        trainer = Trainer(
            config, algorithm, engine, encoder, collector, source, {}, context, precision=engine.precision
        )
        gc.collect()
        gc.freeze()  # as a run does with what it has imported
        directory.begin_attempt(None)
        trainer.fit()
    assert threading.active_count() == 1, threading.enumerate()


def tables(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from mmrl.system.table import table

    head = ["", *(f"{each['size']}: {each['tokens'] / 1e6:.2f} M tokens" for each in found), "growth"]
    rows = [head]

    def row(name: str, key: Callable[[Mapping[str, Any]], float], unit: str, scale: float = 1.0, form: str = ".3f"):
        values = [key(each) for each in found]
        growth = ""
        if len(found) > 1:
            more = (values[-1] - values[-2]) / (found[-1]["tokens"] - found[-2]["tokens"])
            growth = f"{more * (1e9 if unit == 's' else 1):.1f} {'ns' if unit == 's' else 'B'} a token"
        rows.append([name, *(f"{value / scale:{form}} {unit}" for value in values), growth])

    for name in (*PHASES, "records, in a thread"):
        row(name, lambda each, name=name: each["seconds"].get(name, 0.0), "s")
    row("all but the thread", lambda each: each["total_s"], "s")
    row("all, wall clock", lambda each: each["wall_s"], "s")
    row("peak resident memory", lambda each: each["peak_bytes"], "GB", 1e9, ".2f")
    row("sent to ranks", lambda each: each["sent_bytes"], "MB", 1e6, ".1f")
    row("received from ranks", lambda each: each["received_bytes"], "MB", 1e6, ".1f")
    yield from table(rows, "<>")
    for name, size in sorted(found[-1].get("record_bytes", {}).items(), key=lambda pair: -pair[1])[:8]:
        yield f"records: {name} {size / found[-1]['tokens']:.2f} bytes a token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--size", nargs="+", default=list(SIZES), help="shares of 512 prompts")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each size; the first is not counted")
    parser.add_argument("--without-records", action="store_true", help="write no records of rollouts")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--draw", type=Path, help="show the tables of such a file again")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            one = measure(Fraction(args.size[0]), args.steps, Path(folder), with_records=not args.without_records)
        print(json.dumps(one))
        return
    found = json.loads(args.draw.read_text()) if args.draw else []
    for size in () if args.draw else args.size:
        words = ["--one", "--size", size, "--steps", str(args.steps), *["--without-records"] * args.without_records]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(tables(found)))


if __name__ == "__main__":
    main()
