"""Rows of an optimizer step, to a rank under Ray and their log-probs back: `python tests/benchmarks/shipping.py`.

The rows are those of one of eight ranks at the driver's full size (``driver.py``): 64 prompts of 1,000 tokens with 5
completions of 2,048 tokens each. They travel object by object, as version 0.2.0 sent them, and packed, by turns. The
rank is an actor in a process of its own. It reads every row once and answers two numbers for each token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from driver import COMPLETION, GROUP, PROMPT, PROMPTS, RANKS, VOCABULARY

ROUNDS = 7


def rows() -> list[Any]:
    """One rank's rows; nothing of one shares memory with another."""
    from mmrl.types import EncodedPrompt, Prompt, Sample, Segment, TrainingRow

    rng, made = np.random.default_rng(0), []
    for number in range(PROMPTS // RANKS):
        ids = rng.integers(0, VOCABULARY, PROMPT, np.int32)
        prompt = EncodedPrompt(prompt=Prompt(str(number), ()), text="", token_ids=ids, images=())
        for _ in range(GROUP):
            written = rng.integers(0, VOCABULARY, COMPLETION, np.int32)
            segment = Segment(written, True, -rng.random(COMPLETION, np.float32))
            columns = {"advantages": np.full(COMPLETION, 0.5, np.float32)}
            made.append(TrainingRow(Sample(prompt, (segment,)), 1.0, np.ones(COMPLETION, bool), columns))
    return made


def main() -> None:
    import ray

    from mmrl.cluster.shipping import PackedArrays, PackedRows

    class Rank:
        def update(self, rows: Sequence[Any], answer: Callable[[Any], Any]) -> Any:
            values = [row.sample.sampler_logprobs + row.advantages for row in rows]
            return answer(values), answer([value * 2 for value in values])

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    rank, made = ray.remote(Rank).remote(), rows()
    ways = {"object by object": (list, list), "packed": (PackedRows, PackedArrays)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first starts the actor and imports
        for name, (send, answer) in ways.items():
            start = time.perf_counter()
            ray.get(rank.update.remote(send(made), answer))
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, found in seconds.items():
        print(f"{name}: {medians[name]:.3f} s ({min(found[1:]):.3f} to {max(found[1:]):.3f})")
    print(f"ratio {medians['packed'] / medians['object by object']:.2f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
