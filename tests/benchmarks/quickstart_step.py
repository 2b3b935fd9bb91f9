"""Where a training step's time goes: `python tests/benchmarks/quickstart_step.py CONFIG [section.key=value ...]`.

Runs the config as `mmrl train` does, with a clock around DeepSpeed's forward, backward and step, and prints medians
over the steps after the first three. What is left of a step is the framework's own: packing, loss, records, waiting.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

WARM_UP_STEPS = 3


def clocked(seconds: dict[str, list[float]], cls: type, method: str) -> None:
    """Replace a method by one that notes each call's seconds."""
    original = getattr(cls, method)

    @functools.wraps(original)
    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[method][-1] += time.perf_counter() - start

    setattr(cls, method, timed)


def main() -> None:
    from mmrl import registry, run
    from mmrl.config import load_config

    loaded = load_config([Path(sys.argv[1])], sys.argv[2:], options_class=registry.options_class)
    import deepspeed

    from mmrl.trainer import Trainer

    seconds: dict[str, list[float]] = defaultdict(list)
    for method in ("forward", "backward", "step"):
        clocked(seconds, deepspeed.DeepSpeedEngine, method)
    train_step = Trainer.train_step

    def one_step(self, step):
        for method in ("forward", "backward", "step"):
            seconds[method].append(0.0)
        return train_step(self, step)

    Trainer.train_step = one_step
    run.train(loaded)
    lines = (Path(loaded.config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1:]
    parts = {
        "generate": [step.get("perf/generate_s", 0.0) for step in steps],
        "weight sync": [step.get("perf/sync_s", 0.0) for step in steps],
        "forward": seconds["forward"],
        "backward": seconds["backward"],
        "optimizer": seconds["step"],
    }
    total = [step["perf/step_s"] for step in steps]
    engines = [sum(parts[p][i] for p in parts if p != "weight sync") for i in range(len(total))]
    parts["everything else, sync included"] = [t - e for t, e in zip(total, engines, strict=True)]
    median = {name: statistics.median(values[WARM_UP_STEPS:]) for name, values in parts.items()}
    whole = statistics.median(total[WARM_UP_STEPS:])
    print(f"\n{len(total) - WARM_UP_STEPS} steps, median {whole:.3f} s")
    for name, value in median.items():
        print(f"{name:<32} {value:7.3f} s  {value / whole:6.1%}")
    print(f"{'peak resident memory':<32} {steps[-1]['perf/memory_bytes_max'] / 1e9:7.2f} GB")


if __name__ == "__main__":
    main()
