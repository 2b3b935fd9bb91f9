"""What scoring costs beside the grader itself: `python tests/benchmarks/score_answers.py [WORKERS ...]`.

Grades 2,500 different math answers once in this process and once with the Scorer's workers, in groups of 8, and prints
seconds and the ratio of the Scorer's time to the grader's divided by the workers. The pairs are like Geometry3K's: four
fifths are plain numbers, the others roots, fractions and angles, which math-verify compares; no pair is there twice, so
that nothing is remembered. Workers are started and have imported the grader before the clock runs, as in a run.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

ANSWERS, GROUP, WARM_UP = 2500, 8, 64


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Golds and answers, half of them right; each is another one."""
    rng, made = random.Random(seed), []
    for index in range(count):
        n, m = rng.randint(2, 10**6) * 2 + seed % 2, rng.randint(2, 999)
        right = index % 2 == 0
        k = n if right else n + 1
        made.append(
            {
                0: (rf"{m} \sqrt {{ {n} }}", rf"\sqrt{{{m * m * k}}}"),
                1: (rf"\frac {{ {n} }} {{ {m} }} \pi", rf"\frac{{{2 * k}\pi}}{{{2 * m}}}"),
            }.get(index % 10, (str(n), rf"{k}^\circ" if index % 3 else str(k)))
        )
    return made


def groups(count: int, seed: int):
    from mmrl.types import EncodedPrompt, Rollout, RolloutGroup, Segment

    made = []
    for start, (gold, _) in enumerate(pairs(count // GROUP, seed)):
        prompt = EncodedPrompt(
            f"{seed}-{start}", (), gold, {"problem": "x" * 200}, None, "x" * 300, np.zeros(400, np.int32), ()
        )
        answers = [answer for _, answer in pairs(GROUP, 1000 * seed + start)]
        segment = Segment(np.zeros(100, np.int32), True, np.zeros(100, np.float32))
        texts = [f"Some reasoning, {'and more ' * 40}. So \\boxed{{{answer}}}" for answer in answers]
        made.append(
            RolloutGroup(prompt, tuple(Rollout(prompt, (segment,), i, t, "stop", 1) for i, t in enumerate(texts)))
        )
    return made


def main() -> None:
    from mmrl.config import RewardSpec
    from mmrl.reward_worker import call
    from mmrl.scoring import Scorer
    from mmrl_rewards.math import Math

    reward, cold = Math(Math.Config()), groups(WARM_UP * GROUP, 1)
    for group in cold[:WARM_UP]:
        call(reward, group.rollouts)
    workload = groups(ANSWERS, 2)
    start, cpu = time.perf_counter(), time.process_time()
    expected = [call(reward, group.rollouts) for group in workload]
    grader_s, grader_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    count = sum(len(group.rollouts) for group in workload)
    print(f"grader alone: {count} answers in {grader_s:.2f} s ({grader_cpu_s:.2f} s of processor)")
    for workers in [int(argument) for argument in sys.argv[1:]] or [1, 2]:
        with Scorer([RewardSpec(name="math")], workers=workers) as scorer:
            for future in [scorer.submit(group) for group in cold * workers]:
                future.result(120)
            start, cpu = time.perf_counter(), time.process_time()
            futures = [scorer.submit(group) for group in workload]
            scored = [future.result(300).rewards.tolist() for future in futures]
            seconds, parent_s = time.perf_counter() - start, time.process_time() - cpu
        assert scored == expected
        ratio = seconds / (grader_s / workers)
        print(f"Scorer, {workers} workers: {seconds:.2f} s, ratio {ratio:.2f}; {parent_s:.2f} s of it in the parent")


if __name__ == "__main__":
    main()
