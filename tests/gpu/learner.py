"""Updates of a random model of Qwen2.5-VL-3B's widths: seconds, MFU and peak memory beside what ``mmrl plan`` says.

First eight layers, with each setting that changes memory or speed, from the same weights: sharing and checkpointing
change no gradient, and no ZeRO stage does. Then all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
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
    "stage 3": {"learner": {"zero_stage": 3}},
}
"""What differs from ZeRO 1 with shared prompts and gradient checkpointing."""
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
    training, norms = Training(bench, model, data, load), dict[str, float]()
    for name, changes in CASES.items():
        bench.attempt(f"{layers} layers, {name}", partial(_update, bench, training, changes, norms, 3))
    bench.attempt("gradient norms agree", partial(_compare, bench, norms))
    bench.attempt(f"{widths.layers} layers", partial(_deep, bench, training, model, not reason))


def _update(
    bench: Bench, training: Training, changes: Mapping[str, Any], norms: dict[str, float], repeats: int, name: str
) -> Row:
    """Time updates; the first one's gradient norm is kept."""
    config = training.config(**_settings(changes))
    planned = training.forecast(config)["peak"]
    run = training.start(config)
    first = run.update()
    if first.fault or first.notice:
        raise RuntimeError(first.fault or first.notice)
    norms[name] = first.metrics["policy/grad_norm"]
    peak = bench.peak_bytes(run.update)
    seconds = bench.seconds(run.update, repeats)
    most = run.engine.describe()["peak"]
    mfu = "MFU not known on this device" if most is None else f"MFU {first.flops / seconds / most['flops_per_s']:.1%}"
    tokens = sum(row.sample.num_tokens for row in run.rows)
    value = (
        f"{seconds:.3f} s, {mfu}, {tokens / seconds:.0f} tokens/s, peak {gigabytes(peak)}, planned {gigabytes(planned)}"
    )
    fits = peak is None or peak <= PLAN_LIMIT * planned
    return bench.row(name, value, good=fits, why=GOAL if fits else f"more than {PLAN_LIMIT} times what is planned")


def _settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**changes, "learner": {"zero_stage": 1, **changes.get("learner", {})}}


def _compare(bench: Bench, norms: Mapping[str, float], name: str) -> Row:
    """The same weights and the same rows: one gradient."""
    if len(norms) < 2:
        raise RuntimeError("fewer than two updates went well")
    far = max(norms.values()) / min(norms.values()) - 1
    value = ", ".join(f"{each.partition(', ')[2]}: {norm:.5g}" for each, norm in norms.items())
    good = math.isfinite(far) and far <= NORM_LIMIT
    return bench.row(name, f"{far:.2%} apart ({value})", good=good, why=f"limit {NORM_LIMIT:.0%}")


def _deep(bench: Bench, training: Training, base: Path, vision: bool, name: str) -> Row:
    """All layers, if the plan says that they fit."""
    from mmrl.engine import device

    model = write(bench, bench.folder / "deep", bench.pick(QWEN_3B, TRY), vision=vision, grown_from=base)
    deep = training.of(model)
    needed = deep.forecast(deep.config(**_settings({})))["peak"]
    memory = device.free_memory_bytes(bench.kind)
    if memory is not None and needed > memory[0]:
        why = f"the plan says {gigabytes(needed)}, and {gigabytes(memory[0])} are free"
        return Row(bench.area, name, "skipped", "", why)
    return _update(bench, deep, {}, {}, 2, name)
