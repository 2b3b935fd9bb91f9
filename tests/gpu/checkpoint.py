"""Save, build an engine anew from what was saved, and go on: the same log-probs, and how fast the disk is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.bench import Bench
from tests.gpu.published import QWEN_3B, TRY, Load, Training, shallow, write, write_prompts
from tests.gpu.row import Row

LOAD = Load(prompts=2, prompt_tokens=200, group=4, completion=40, budget=1000, image=None)
LAYERS = 3


def run(bench: Bench) -> None:
    model = write(bench, bench.folder / "model", shallow(bench.pick(QWEN_3B, TRY), bench.pick(LAYERS, 2)), vision=False)
    training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
    for stage in (1, 3):
        _through(bench, training, stage, bench.folder / f"checkpoint-{stage}")


def _through(bench: Bench, training: Training, stage: int, folder: Path) -> None:
    """An update, a checkpoint, an update; then from the checkpoint the second update again."""
    found: dict[str, Any] = {}
    bench.attempt(f"stage {stage}: save", partial(_save, bench, training, stage, folder, found))
    if "second" in found:
        bench.attempt(f"stage {stage}: restore", partial(_restore, bench, training, stage, folder, found))
    for moment, what in (("first", "restored = saved"), ("second", "one update later")):
        if f"{moment} again" in found:
            bench.attempt(f"stage {stage}: {what}", partial(_compare, bench, found[moment], found[f"{moment} again"]))
    shutil.rmtree(folder, ignore_errors=True)


def _config(training: Training, stage: int) -> Any:
    return training.config(learner={"zero_stage": stage, "lr": 1e-3})


def _save(bench: Bench, training: Training, stage: int, folder: Path, found: dict[str, Any], name: str) -> Row:
    run = training.start(_config(training, stage))
    run.update()
    first = run.logprobs()
    with run.engine.learning() as learner:
        seconds = bench.all_seconds(lambda: learner.save(folder), 1)[0]
    run.update()
    found |= {"first": first, "second": run.logprobs()}
    run.release()
    return bench.row(name, _rate(folder, seconds))


def _restore(bench: Bench, training: Training, stage: int, folder: Path, found: dict[str, Any], name: str) -> Row:
    begin = time.perf_counter()
    run = training.start(_config(training, stage), checkpoint=folder)
    bench.wait()
    seconds = time.perf_counter() - begin
    found["first again"] = run.logprobs()
    run.update()
    found["second again"] = run.logprobs()
    run.release()
    return bench.row(name, f"{_rate(folder, seconds)}, the engine's start included")


def _compare(bench: Bench, one: Sequence[Any], other: Sequence[Any], name: str) -> Row:
    from mmrl.ops.parity import LIMITS, Gap

    gap = Gap.between(one, other)
    value = f"log-probs mean {gap.abs_mean:.1e}, max {gap.abs_max:.1e} nats apart"
    return bench.row(name, value, good=gap.verdict(LIMITS["bfloat16"]) == "ok")


def _rate(folder: Path, seconds: float) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s"
