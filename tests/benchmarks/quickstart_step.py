"""Where a training step's time goes: `python tests/benchmarks/quickstart_step.py CONFIG [section.key=value ...]`.

Runs the config as `mmrl train` does, with a clock around DeepSpeed's forward, backward and step and around the
driver's own work, and prints medians over the steps after the first three. What is left of a step is the framework's
own: packing, loss, records, waiting. Only what the driver waits for counts: work of other threads does not.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

WARM_UP_STEPS = 3


def clocked(seconds: dict[str, list[float]], name: str, cls: type, method: str) -> None:
    """Replace a method by one that notes the seconds of each call from the main thread."""
    original = getattr(cls, method)
    seconds[name] = []

    @functools.wraps(original)
    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            if seconds[name] and threading.current_thread() is threading.main_thread():
                seconds[name][-1] += time.perf_counter() - start

    setattr(cls, method, timed)


def clocks() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds in each step, of the engine's parts and of what the driver does besides."""
    import deepspeed

    from mmrl.engine.vision import ImageInputs
    from mmrl.engine.vllm_sampler import VLLMSampler
    from mmrl.recording import RunRecorder
    from mmrl.supply import Supply

    engine: dict[str, list[float]] = defaultdict(list)
    for name, method in {"forward": "forward", "backward": "backward", "optimizer": "step"}.items():
        clocked(engine, name, deepspeed.DeepSpeedEngine, method)
    driver: dict[str, list[float]] = defaultdict(list)
    clocked(driver, "prompts: read and encode", Supply, "draw")
    clocked(driver, "sampler: images (in generate)", VLLMSampler, "_add")
    clocked(driver, "learner: images", ImageInputs, "__call__")
    clocked(driver, "records of rollouts", RunRecorder, "rollouts")
    clocked(driver, "checkpoint (after the step)", RunRecorder, "save")
    return engine, driver


def main() -> None:
    from mmrl import registry, run
    from mmrl.config import load_config

    loaded = load_config([Path(sys.argv[1])], sys.argv[2:], options_class=registry.options_class)
    from mmrl.trainer import Trainer

    engine, driver = clocks()
    train_step = Trainer.train_step

    def one_step(self, step):
        for values in (*engine.values(), *driver.values()):
            values.append(0.0)
        return train_step(self, step)

    Trainer.train_step = one_step
    run.train(loaded)
    lines = (Path(loaded.config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1:]
    parts = {
        "generate": [step.get("perf/generate_s", 0.0) for step in steps],
        "weight sync": [step.get("perf/sync_s", 0.0) for step in steps],
        **engine,
    }
    total = [step["perf/step_s"] for step in steps]
    engines = [sum(parts[p][i] for p in parts if p != "weight sync") for i in range(len(total))]
    parts["everything else, sync included"] = [t - e for t, e in zip(total, engines, strict=True)]
    whole = statistics.median(total[WARM_UP_STEPS:])
    print(f"\n{len(total) - WARM_UP_STEPS} steps, median {whole:.3f} s")
    for name, values in {**parts, **{f"  {name}": values for name, values in driver.items()}}.items():
        value = statistics.median(values[WARM_UP_STEPS:])
        print(f"{name:<34} {value:7.3f} s  {value / whole:6.1%}")
    print(f"{'peak resident memory':<34} {steps[-1]['perf/memory_bytes_max'] / 1e9:7.2f} GB")


if __name__ == "__main__":
    main()
