"""What scoring costs beside the grader itself: `python tests/benchmarks/score_answers.py [WORKERS ...]`.

Grades 2,500 different math answers once in this process and once with the Scorer's workers, in groups of 8, and prints
seconds and the ratio of the Scorer's time to the grader's divided by the workers. The pairs are like Geometry3K's: four
fifths are numbers and angles, the others roots and fractions, which math-verify compares; no pair is there twice, so
that nothing is remembered. Workers are started and have imported the grader before the clock runs, as in a run.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

from mmrl.config.plugin_specs import RewardSpec
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.rollout.rewards.worker import call
from mmrl.types import EncodedPrompt, Prompt, Rollout, RolloutGroup, Segment
from mmrl_rewards.math import Math

ANSWERS, GROUP, WARM_UP = 2500, 8, 64


def question(rng: random.Random, index: int) -> tuple[str, list[str]]:
    """A reference and the answers of a group, every other one right."""
    n, m = rng.randint(2, 10**6), rng.randint(2, 999)
    tries = [n if place % 2 == 0 else n + place for place in range(GROUP)]
    if index % 10 == 0:
        return rf"{m} \sqrt {{ {n} }}", [rf"\sqrt{{{m * m * k}}}" for k in tries]
    if index % 10 == 1:
        wide = [place + 2 for place in range(GROUP)]
        return rf"\frac {{ {n} }} {{ {m} }} \pi", [
            rf"\frac{{{w * k}\pi}}{{{w * m}}}" for w, k in zip(wide, tries, strict=True)
        ]
    return str(n), [rf"{k}^\circ" if place % 3 else str(k) for place, k in enumerate(tries)]


def groups(count: int, seed: int) -> list[RolloutGroup]:
    rng, made = random.Random(seed), []
    segment = Segment(np.zeros(100, np.int32), True, np.zeros(100, np.float32))
    for index in range(count):
        reference, answers = question(rng, index)
        columns, ids = {"problem": "x" * 200}, np.zeros(400, np.int32)
        row = Prompt(f"{seed}-{index}", (), answer=reference, columns=columns)
        prompt = EncodedPrompt(prompt=row, text="x" * 300, token_ids=ids, images=())
        texts = [f"Some reasoning, {'and more ' * 40}. So \\boxed{{{answer}}}" for answer in answers]
        rollouts = tuple(Rollout(prompt, (segment,), i, text, "stop", 1) for i, text in enumerate(texts))
        made.append(RolloutGroup(prompt, rollouts))
    return made


def worker_s() -> float:
    """Processor seconds that this process's children have used so far."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    reward, cold = Math(Math.Config()), groups(WARM_UP, 1)
    for group in cold:
        call(reward, group.rollouts)
    workload = groups(-(-ANSWERS // GROUP), 2)
    start, cpu = time.perf_counter(), time.process_time()
    expected = [list(call(reward, group.rollouts)) for group in workload]
    assert all(sum(scores) == GROUP / 2 for scores in expected)
    grader_s, grader_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    count = sum(len(group.rollouts) for group in workload)
    print(f"grader alone: {count} answers in {grader_s:.2f} s ({grader_cpu_s:.2f} s of processor)")
    for workers in [int(argument) for argument in sys.argv[1:]] or [1, 2]:
        with Scorer([RewardSpec(name="math")], workers=workers) as scorer:
            for future in [scorer.submit(group) for group in cold * workers]:
                future.result(120)
            start, cpu, before = time.perf_counter(), time.process_time(), worker_s()
            futures = [scorer.submit(group) for group in workload]
            scored = [future.result(300).rewards.tolist() for future in futures]
            seconds, parent_s = time.perf_counter() - start, time.process_time() - cpu
            busy_s = worker_s() - before
        assert scored == expected
        ratio = seconds / (grader_s / workers)
        print(f"Scorer, {workers} workers: {seconds:.2f} s, ratio {ratio:.2f}; ", end="")
        print(f"processor: {busy_s:.2f} s in workers, {parent_s:.2f} s here")


if __name__ == "__main__":
    main()
