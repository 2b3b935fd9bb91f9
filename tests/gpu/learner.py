"""Updates of a random model of Qwen2.5-VL-3B's widths: seconds, MFU and peak memory beside what ``mmrl plan`` says.

First eight layers, with each setting that changes memory or speed, from the same weights: sharing and checkpointing
change no gradient, and no ZeRO stage does. Then all layers, and stage 3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.bench import Bench, gigabytes, lacks_image_features
from tests.gpu.published import QWEN_3B, TRY, Load, Training, shallow, write, write_prompts
from tests.gpu.row import Row

LAYERS = 8
WHOLE = Load(prompts=4, prompt_tokens=2000, group=16, completion=126, budget=16_000, image=(1008, 784))
SMALL = Load(prompts=2, prompt_tokens=60, group=4, completion=6, budget=160, image=(84, 56))
CASES: Mapping[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 1, prompts repeated": {"learner": {"share_prefix": "off"}},
    "stage 1, no checkpointing": {"model": {"gradient_checkpointing": False}},
    "stage 0": {"learner": {"zero_stage": 0}},
}
"""What differs from ZeRO 1 with shared prompts and gradient checkpointing."""
LAST = {"stage 3": {"learner": {"zero_stage": 3}}}
"""After all that needs memory: DeepSpeed 0.19 gives none of it back."""
REPEATS = 2
GOAL = "goal: MFU of 40 % with shared prompts"
NORM_LIMIT = 0.05
"""Relative difference of two gradients' norms in bfloat16; a wrong mask or scale makes much more."""
PLAN_LIMIT = 1.2
"""A peak this many times the plan's would end a run that the plan said fits."""


def run(bench: Bench) -> None:
    reason = lacks_image_features()
    if reason:
        bench.skip("images", f"{reason}; a text model of the same widths takes the place")
    load = replace(bench.pick(WHOLE, SMALL), **({"image": None} if reason else {}))
    widths, data = bench.pick(QWEN_3B, TRY), write_prompts(bench.folder / "data", load)
    layers = bench.pick(LAYERS, 2)
    model = write(bench, bench.folder / "model", shallow(widths, layers), vision=not reason)
    training, updates = Training(bench, model, data, load), dict[str, Update]()
    for name, changes in CASES.items():
        bench.attempt(f"{layers} layers, {name}", partial(_update, bench, training, changes, updates))
    bench.attempt(f"{widths.layers} layers", partial(_deep, bench, training, model, not reason, {}))
    for name, changes in LAST.items():
        bench.attempt(f"{layers} layers, {name}", partial(_update, bench, training, changes, updates))
    if len(updates) > 1:
        bench.attempt("gradient norms agree", partial(_compare, bench, updates))
    pair = [updates.get(f"{layers} layers, {case}") for case in list(CASES)[:2]]
    if all(pair):
        bench.emit(bench.row("what sharing gains", f"{pair[1].seconds / pair[0].seconds:.1f}x", why="goal: 5x"))


@dataclass(frozen=True, slots=True)
class Update:
    """The gradient's norm of the first one, and seconds of a later one."""

    norm: float
    seconds: float


def _update(bench: Bench, training: Training, changes: Mapping[str, Any], updates: dict[str, Update], name: str) -> Row:
    """Time updates, of which the first warms up, if the plan says that there is room for them."""
    from mmrl.engine import device

    config = training.config(**_settings(changes))
    planned, memory = training.forecast(config)["peak"], device.free_memory_bytes(bench.kind)
    if memory is not None and planned > memory[0]:
        why = f"the plan says {gigabytes(planned)}, and {gigabytes(memory[0])} are free"
        return Row(bench.area, name, "skipped", "", why)
    run = training.start(config)
    first = run.update()
    if first.fault or first.notice:
        raise RuntimeError(first.fault or first.notice)
    peak = bench.peak_bytes(run.update)
    seconds = statistics.median(bench.all_seconds(run.update, REPEATS))
    updates[name] = Update(first.metrics["policy/grad_norm"], seconds)
    most = run.engine.describe()["peak"]
    run.release()
    mfu = "MFU not known on this device" if most is None else f"MFU {first.flops / seconds / most['flops_per_s']:.1%}"
    tokens = sum(row.sample.num_tokens for row in run.rows)
    value = (
        f"{seconds:.3f} s, {mfu}, {tokens / seconds:.0f} tokens/s, peak {gigabytes(peak)}, planned {gigabytes(planned)}"
    )
    fits = peak is None or peak <= PLAN_LIMIT * planned
    return bench.row(name, value, good=fits, why=GOAL if fits else f"more than {PLAN_LIMIT} times what is planned")


def _settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**changes, "learner": {"zero_stage": 1, **changes.get("learner", {})}}


def _compare(bench: Bench, updates: Mapping[str, Update], name: str) -> Row:
    """The same weights and the same rows: one gradient."""
    norms = {each.partition(", ")[2]: update.norm for each, update in updates.items()}
    far = max(norms.values()) / min(norms.values()) - 1
    value = "; ".join(f"{each} {norm:.5g}" for each, norm in norms.items())
    good = math.isfinite(far) and far <= NORM_LIMIT
    return bench.row(name, f"{far:.2%} apart ({value})", good=good, why=f"limit {NORM_LIMIT:.0%}")


def _deep(bench: Bench, training: Training, base: Path, vision: bool, updates: dict[str, Update], name: str) -> Row:
    """All layers."""
    model = write(bench, bench.folder / "deep", bench.pick(QWEN_3B, TRY), vision=vision, grown_from=base)
    return _update(bench, training.of(model), {}, updates, name)
