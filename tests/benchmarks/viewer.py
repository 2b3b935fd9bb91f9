"""Seconds and memory of `mmrl view` for runs of 10,000 rollouts that mmrl's own writer has made.

    python -m tests.benchmarks.viewer FOLDER

Makes three runs in FOLDER, if they are not there: in 40 steps, in two steps, and one of few completions of 8,192
tokens. Each is served by a process of its own, and asked for what the page asks for: the first page (curves), a step's
table, groups at random and their pictures, a search, a prompt.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psutil

from mmrl.data.grid import ImageGrid
from mmrl.data.images import MediaStore
from mmrl.runs.directory import RunDirectory
from mmrl.types import (
    CreditedGroup,
    EncodedPrompt,
    Message,
    PreUpdateStatistics,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
)
from mmrl.viewer.pages import MODULES
from tests.viewer.made_run import CONFIG, picture, tokenizer

WORDS = ["the", "circle", "is", "red", "and", "blue", "so", "I", "look", "at", "a", "square", "again", "or", "数学"]
ASKED = 40
"""Groups at random."""


@dataclass(frozen=True)
class Shape:
    """How the rollouts of a made run are laid out."""

    steps: int
    groups: int
    size: int
    tokens: int

    @property
    def rollouts(self) -> int:
        return self.steps * self.groups * self.size


SHAPES = {
    "in 40 steps": Shape(40, 32, 8, 300),
    "in 2 steps": Shape(2, 640, 8, 300),
    "long": Shape(2, 8, 8, 8192),
}


def make(folder: Path, shape: Shape) -> Path:
    """A run with pictures, two log-probs, two updates and 60 metrics; made once."""
    if folder.exists():
        return folder
    directory = RunDirectory.create(folder)
    directory.begin_attempt(None)
    directory.write_config(CONFIG)
    (folder / "checkpoints" / "step-000000" / "model").mkdir(parents=True)
    tokenizer().save(str(folder / "checkpoints" / "step-000000" / "model" / "tokenizer.json"))
    (folder / "checkpoints" / "step-000000" / "manifest.json").write_text("{}")
    media, rng = MediaStore(directory.media, ImageGrid(28, 784, 78400)), np.random.default_rng(0)
    pictures = [picture(media, number) for number in range(30)]
    for step in range(1, shape.steps + 1):
        groups = (_group(rng, shape, step, number, pictures[number % 30]) for number in range(shape.groups))
        directory.write_rollouts(step, groups)
        directory.append_metrics(step, {f"section/metric_{n}": float(rng.normal()) for n in range(60)})
    directory.end_attempt(0)
    directory.release()
    return folder


def _group(rng: np.random.Generator, shape: Shape, step: int, number: int, image: Any) -> CreditedGroup:
    question = f"question {number}: " + " ".join(rng.choice(WORDS, 30))
    row = Prompt(id=f"rows/{number}", messages=(Message("user", f"<image>{question}"),), answer="red")
    prompt = EncodedPrompt(
        prompt=row, text=question, token_ids=np.arange(200, dtype=np.int32), images=(image,), epoch=step - 1
    )
    lengths = rng.integers(shape.tokens // 2, shape.tokens * 3 // 2, shape.size)
    logprobs = [-rng.exponential(0.3, n).astype(np.float32) for n in lengths]
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            segments=(Segment(rng.integers(5, tokenizer().get_vocab_size(), n).astype(np.int32), True, values),),
            index=index,
            text=" ".join(rng.choice(WORDS, n)),
            finish_reason="stop",
            weight_version=step,
        )
        for index, (n, values) in enumerate(zip(lengths, logprobs, strict=True))
    )
    rewards = rng.integers(0, 2, shape.size).astype(np.float64)
    scored = ScoredGroup(
        RolloutGroup(prompt, rollouts),
        rewards,
        np.ones(shape.size, np.bool_),
        {"exact": rewards},
        answers={"exact": ["red"] * shape.size},
    )
    entropy = [rng.random(n).astype(np.float32) for n in lengths]
    learner = [values + rng.normal(0, 1e-3, len(values)).astype(np.float32) for values in logprobs]
    updates = [
        [PreUpdateStatistics(a, b), PreUpdateStatistics(a * 1.01, b)] for a, b in zip(learner, entropy, strict=True)
    ]
    return CreditedGroup(scored, [np.full(n, 0.5) for n in lengths], learner, True, learner, updates)


class Viewer:
    """``mmrl view`` in a process of its own."""

    def __init__(self, run: Path) -> None:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "mmrl", "view", str(run), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.match(r"http://127.0.0.1:(\d+)/\?token=(.*)", self.process.stdout.readline())
        assert found is not None
        self.started_s = time.perf_counter() - begun
        self._connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
        self._headers = {"Cookie": f"mmrl-view-{found[1]}={found[2]}"}
        self._process_times = psutil.Process(self.process.pid)
        self.bytes = 0

    def ask(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        self.bytes = len(body)
        return body

    def seconds(self, *paths: str) -> tuple[float, float]:
        """Seconds until all is answered, and those of a processor in the server."""
        begun, used = time.perf_counter(), self.processor_s()
        for path in paths:
            self.ask(path)
        return time.perf_counter() - begun, self.processor_s() - used

    def processor_s(self) -> float:
        times = self._process_times.cpu_times()
        return times.user + times.system

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def measure(run: Path, shape: Shape) -> Iterator[tuple[str, Sequence[tuple[float, float]]]]:
    """Each request's name with the seconds it took, by the clock and of a processor; the memory is the last one."""
    viewer, rng = Viewer(run), random.Random(0)
    try:
        yield "start of the process", [(viewer.started_s, viewer.processor_s())]
        files = ("", "viewer.css", *(f"{name}.js" for name in MODULES))
        data = ("runs", "run/0", "run/0/metrics", "run/0/events")
        first = [*(f"/{name}" for name in files), *(f"/data/{name}" for name in data)]
        yield "first page", [viewer.seconds(*first)]
        yield "first table of a step", [viewer.seconds("/data/run/0/step/1")]
        others = range(2, min(shape.steps, 9) + 1)
        yield "tables of other steps", [viewer.seconds(f"/data/run/0/step/{step}") for step in others]
        places = [(rng.randint(1, shape.steps), rng.randrange(shape.groups)) for _ in range(ASKED)]
        yield "any group", [viewer.seconds(f"/data/run/0/step/{step}/group/{group}") for step, group in places]
        yield (
            f"the last group ({viewer.bytes / 1e6:.1f} MB) again",
            [viewer.seconds(f"/data/run/0/step/{step}/group/{group}") for step, group in places[-1:] * 10],
        )
        groups = json.loads(viewer.ask("/data/run/0/step/1"))["groups"]
        hashes = {image["hash"] for group in groups for image in group["images"]}
        yield "pictures", [viewer.seconds(f"/media/0/{name}") for name in hashes]
        yield "a search through a step", [viewer.seconds("/data/run/0/step/2/search?q=no%20such%20words")]
        prompt = f"/data/run/0/prompt?id={quote('rows/3', safe='')}"
        yield "a prompt over all steps, first", [viewer.seconds(prompt)]
        yield "a prompt over all steps, again", [viewer.seconds(prompt)]
        print(f"  most memory {viewer.memory_bytes() / 1e6:.0f} MB")
    finally:
        viewer.process.terminate()
        viewer.process.wait()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in SHAPES.items():
        begun = time.perf_counter()
        run = make(folder / name.replace(" ", "-"), shape)
        size = sum(file.stat().st_size for file in (run / "rollouts").iterdir()) / 1e6
        print(f"{name}: {shape.rollouts} rollouts, {size:.0f} MB, made in {time.perf_counter() - begun:.0f} s")
        print(f"  {'seconds':36}{'median':>8}{'most':>8}{'processor: median':>20}{'most':>8}")
        for what, seconds in measure(run, shape):
            walls, used = zip(*seconds, strict=True)
            line = f"{statistics.median(walls):8.2f}{max(walls):8.2f}{statistics.median(used):20.2f}{max(used):8.2f}"
            print(f"  {what:36}{line}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
