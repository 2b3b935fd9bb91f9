"""Where a training step's time goes: `python tests/benchmarks/quickstart_step.py CONFIG [section.key=value ...]`.

Runs the config as `mmrl train` does, with a clock around DeepSpeed's forward, backward and step and around the
driver's own work, and prints medians over the steps after the first three. What is left of a step is the framework's
own: packing, loss, records, waiting. Only what the driver waits for counts: work of other threads does not.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from stopwatch import Stopwatch

WARM_UP_STEPS = 3
ENGINE = {"forward": "forward", "backward": "backward", "optimizer": "step"}
"""Parts of a step that are the engine's, and DeepSpeed's methods for them."""


def watch_all(watch: Stopwatch) -> None:
    """Note the engine's parts (``ENGINE``), and what the driver does besides."""
    import deepspeed

    from mmrl.engine.network.vision import ImageInputs
    from mmrl.engine.sampler.vllm_sampler import VLLMSampler
    from mmrl.rollout.prefetch import PromptPrefetcher
    from mmrl.runs.recorder import RunRecorder

    for name, method in ENGINE.items():
        watch.time(deepspeed.DeepSpeedEngine, method, name)
    watch.time(PromptPrefetcher, "draw", "prompts: read and encode")
    watch.time(VLLMSampler, "_add", "sampler: images (in generate)")
    watch.time(ImageInputs, "__call__", "learner: images")
    watch.time(RunRecorder, "rollouts", "records of rollouts")
    watch.time(RunRecorder, "save", "checkpoint (after the step)")


def main() -> None:
    from mmrl.commands import train as run
    from mmrl.config.load import load_config
    from mmrl.plugin_host import registry

    loaded = load_config([Path(sys.argv[1])], sys.argv[2:], options_class=registry.options_class)
    from mmrl.step.loop import Trainer

    watch, found = Stopwatch(), list[dict[str, float]]()
    watch_all(watch)
    train_step = Trainer.train_step

    def one_step(self, step):
        found.append(watch.take())  # of the step before, its checkpoint included
        return train_step(self, step)

    Trainer.train_step = one_step
    run.train(loaded)
    lines = (Path(loaded.config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1:]
    found = [*found[1:], watch.take()]
    parts = {
        "generate": [step.get("perf/generate_s", 0.0) for step in steps],
        "weight sync": [step.get("perf/sync_s", 0.0) for step in steps],
        **{name: [each.get(name, 0.0) for each in found] for name in ENGINE},
    }
    names = dict.fromkeys(name for each in found for name in each if name not in {*ENGINE, "rest"})
    driver = {f"  {name}": [each.get(name, 0.0) for each in found] for name in names}
    total = [step["perf/step_s"] for step in steps]
    engines = [sum(parts[p][i] for p in parts if p != "weight sync") for i in range(len(total))]
    parts["everything else, sync included"] = [t - e for t, e in zip(total, engines, strict=True)]
    whole = statistics.median(total[WARM_UP_STEPS:])
    print(f"\n{len(total) - WARM_UP_STEPS} steps, median {whole:.3f} s")
    for name, values in (parts | driver).items():
        value = statistics.median(values[WARM_UP_STEPS:])
        print(f"{name:<34} {value:7.3f} s  {value / whole:6.1%}")
    print(f"{'peak resident memory':<34} {steps[-1]['perf/memory_bytes_max'] / 1e9:7.2f} GB")


if __name__ == "__main__":
    main()
