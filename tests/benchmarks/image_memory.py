"""Resident memory of driver and rank over many steps with images: `python -m tests.benchmarks.image_memory FOLDER`.

Draws ``--steps`` x ``--prompts`` different images of 480 pixels into FOLDER/rows.parquet, and trains on them, resized
to 448. The driver is ``mmrl train`` with table loader, encoder, prefetcher, reward workers, records and ledger. The
rank is a process of its own: a real ``RankWorker`` behind a pipe, with the learner of a tiny Qwen2.5-VL. Its sampler is
fake and answers random tokens. Inputs of the vision tower are made for every micro-batch of a step, and dropped;
forward, backward and optimizer step are those of the first ``FEW`` prompts.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mmrl.cluster.guard import Process
from mmrl.cluster.ranks import RankLocation
from mmrl.cluster.worker import RankWorker

ROOT = Path(__file__).parents[2]
DRAWN, SHOWN = 480, 448
"""Pixels of a side, in the file and in the model."""
GROUP, COMPLETION = 2, 32
FEW = 4
GROUP_ROWS = 20
EVERY = 10
"""Steps from one look at the memory to the next."""


@dataclass(frozen=True, slots=True)
class Look:
    """Driver and rank as the kernel sees them at the beginning of a step.

    Attributes:
        seconds: Of each step since the last look.
        sizes: Resident bytes of driver and rank.
        peaks: The most that they have had.
    """

    step: int
    seconds: float
    sizes: Sequence[int]
    peaks: Sequence[int]
    descriptors: Sequence[int]


def write_rows(path: Path, num_rows: int) -> None:
    """Questions about drawings of ten coloured shapes each, no two alike."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image, ImageDraw

    def drawing(number: int) -> bytes:
        rng, buffer = np.random.default_rng(number), io.BytesIO()
        image = Image.new("RGB", (DRAWN, DRAWN), "white")
        pencil = ImageDraw.Draw(image)
        for corners, colour in zip(rng.integers(0, DRAWN, (10, 2, 2)), rng.integers(0, 255, (10, 3)), strict=True):
            box = [*corners.min(0).tolist(), *corners.max(0).tolist()]
            draw = (pencil.ellipse, pencil.rectangle)[int(colour[0]) % 2]
            draw(box, fill=tuple(colour.tolist()))
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"problem": pa.string(), "images": pa.list_(image), "answer": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, GROUP_ROWS):
            numbers = range(start, min(start + GROUP_ROWS, num_rows))
            columns = {
                "problem": [f"<image>What is in picture {number}?" for number in numbers],
                "images": [[{"bytes": drawing(number), "path": None}] for number in numbers],
                "answer": [str(number % 10) for number in numbers],
            }
            writer.write_table(pa.table(columns, schema), row_group_size=GROUP_ROWS)


class HalfFakeEngine:
    """Implements ``Engine``, ``Learner`` and its policy on one rank, around a ``RankEngine`` that has no sampler."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._rng, self._updates = engine, np.random.default_rng(0), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Any]:
        from made_groups import MadeGroups

        yield MadeGroups(self._group)

    @contextmanager
    def learning(self) -> Iterator[HalfFakeEngine]:
        with self._engine.learning():
            yield self

    def _group(self, request: Any) -> Any:
        from mmrl.types import Rollout, RolloutGroup, Segment

        rollouts = []
        for member in range(request.num_samples):
            ids = self._rng.integers(100, 250, COMPLETION, np.int32)  # no special token
            segment = Segment(ids, True, -self._rng.standard_exponential(COMPLETION, np.float32))
            rollouts.append(Rollout(request.prompt, (segment,), member, "abc", "length", self._updates))
        return RolloutGroup(request.prompt, tuple(rollouts))

    def network(self, role: str) -> HalfFakeEngine:
        return self

    def score(self, samples: Sequence[Any], *, way: str = "packed") -> list[Any]:
        return [sample.sampler_logprobs * np.float32(1 + 2**-22) for sample in samples]

    def update(self, rows: Sequence[Any]) -> Any:
        self._updates += 1
        learner, samples = self._engine._learner, [row.sample for row in rows]
        for indices in learner.trained._batches.plan(samples, learner.trained._batches.budget.tokens):
            learner.trained._batches.inputs([samples[index] for index in indices])
        first = list(dict.fromkeys(sample.prompt.id for sample in samples))[:FEW]
        result = learner.network("policy").update([row for row in rows if row.sample.prompt.id in first])
        entropies = [self._rng.random(len(row.mask), np.float32) for row in rows]
        return replace(result, logprobs=self.score(samples), entropies=entropies)

    def save(self, folder: Path) -> Any:
        return self._engine._learner.save(folder)


class HalfFakeWorker(RankWorker):
    """A rank with a ``HalfFakeEngine``."""

    def start(self, job: Any) -> Mapping[str, Any]:
        description = super().start(job)
        self._engine = HalfFakeEngine(self._engine)  # type: ignore[assignment]
        return description


def serve(pipe: Any) -> None:
    """Answer calls until the pipe is closed."""
    worker = HalfFakeWorker()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((False, error))


class ChildRank:
    """Implements ``cluster.ranks.Ranks``: one rank, in a child process.

    Args:
        begin: Called with the rank's process id when a step begins to sample.
    """

    def __init__(self, begin: Callable[[int], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._child = context.Process(target=serve, args=(there,), daemon=True)
        self._child.start()
        there.close()
        self._calls, self._begin = ThreadPoolExecutor(1), begin
        self.locations = [RankLocation("node", "host", "127.0.0.1", Process.own())]
        self.names = ["rank 0"]

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        if (method, *args) == ("enter", "sampling"):
            assert self._child.pid is not None
            self._begin(self._child.pid)
        return self._calls.submit(self._ask, method, args)

    def _ask(self, method: str, args: tuple[Any, ...]) -> Any:
        self._pipe.send((method, args))
        is_answer, found = self._pipe.recv()
        if not is_answer:
            raise found
        return found

    def watch(self, lost: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        return None

    def restart(self, ranks: Sequence[int]) -> None:
        raise AssertionError("these ranks end with their group")

    def last_words(self, rank: int) -> str:
        return ""

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        self._calls.shutdown()
        self._pipe.close()
        self._child.join()


def resident(pid: int, key: str) -> int:
    """Bytes of a process, by the kernel's name for them."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(line.split()[1])


def train(folder: Path, num_steps: int, num_prompts: int) -> list[Look]:
    """Train as ``mmrl train`` does; a look every ``EVERY`` steps."""
    from mmrl.cluster import launch
    from mmrl.cluster.group import RankGroup
    from mmrl.cluster.jobs import RankJob
    from mmrl.commands.cli import main as command
    from mmrl.engine.aids.tiny_model import write_model
    from mmrl.engine.learner.counting import UnitCost

    model = folder / "model"
    if not model.exists():
        write_model(model, "qwen2_5_vl")
    looks, step, since = list[Look](), 0, time.monotonic()

    def begin(rank: int) -> None:
        nonlocal step, since
        step += 1
        if step % EVERY == 0 or step == num_steps:
            both = psutil.Process(), psutil.Process(rank)
            sizes, peaks = ([resident(each.pid, key) for each in both] for key in ("VmRSS", "VmHWM"))
            seconds = (time.monotonic() - since) / EVERY
            looks.append(Look(step, seconds, sizes, peaks, [each.num_fds() for each in both]))
            print(looks[-1], flush=True)
            since = time.monotonic()

    def start_engine(spec: Any, **options: Any) -> RankGroup:
        ranks = ChildRank(begin)
        group = RankGroup(ranks, spec.media, UnitCost(spec.folder), ranks_together=1)
        [own] = launch.rendezvous(group, ranks.locations)
        paths = spec.folder.path, str(spec.media.folder)
        settings = spec.config.model_dump(mode="json")
        group.start([RankJob(settings, own, *paths, spec.media.grid, spec.max_images, False, True)])
        return group

    launch.start_engine = start_engine
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train": {"name": "table", "path": str(folder / "rows.parquet"), "limit": num_steps * num_prompts},
            "scan_rows": 1,
            "max_images": 1,
            "max_pixels": SHOWN**2,
        },
        "rewards": [{"name": f"{ROOT / 'tests' / 'faults' / 'letters.py'}:even"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": GROUP, "max_new_tokens": COMPLETION},
        "learner": {"tokens_per_microbatch": 8192},
        "trainer": {
            "steps": num_steps,
            "prompts_per_step": num_prompts,
            "save_every": max(num_steps // 4, 1),
            "run_dir": str(folder / f"run-{time.time_ns()}"),
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    if code := command(["train", str(path)]):
        raise SystemExit(code)
    return looks


def slope(looks: Sequence[Look], process: int) -> float:
    """Bytes that a step adds to a process in the second half of the run (least squares)."""
    late = looks[len(looks) // 2 :]
    return statistics.linear_regression([each.step for each in late], [each.sizes[process] for each in late]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=512, help="prompts of a step")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = args.folder / "rows.parquet"
    if not rows.exists():
        begun = time.monotonic()
        write_rows(rows, args.steps * args.prompts)
        print(f"{rows.stat().st_size / 1e6:.0f} MB of images, drawn in {time.monotonic() - begun:.0f} s", flush=True)
    looks = train(args.folder, args.steps, args.prompts)
    for process, name in enumerate(["driver", "rank"]):
        course = ", ".join(f"{each.step}: {each.sizes[process] / 1e6:.0f}" for each in looks)
        print(f"{name}, MB at step {course}")
        added = f"a step of the second half adds {slope(looks, process) / 1e3:.1f} kB; " if len(looks) > 3 else ""
        files = [each.descriptors[process] for each in looks]
        most = f"at most {looks[-1].peaks[process] / 1e6:.0f} MB"
        print(f"{name}: {added}{most}, {min(files)} to {max(files)} descriptors")
    print(f"{looks[0].seconds:.2f} s a step at first, {looks[-1].seconds:.2f} s at last")


if __name__ == "__main__":
    main()
