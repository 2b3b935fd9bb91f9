"""Updates with nothing, the optimizer, or all weights in the host's memory: one gradient, and what each place holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.gpu.bench import Bench, gigabytes
from tests.gpu.published import QWEN_3B, TRY, Load, Training, shallow, write, write_prompts
from tests.gpu.row import Row

LOAD = Load(prompts=2, prompt_tokens=200, group=4, completion=40, budget=1000, image=None)
LAYERS = 4
NORM_LIMIT = 0.05
"""Relative difference of the second update's gradient in bfloat16, after a first one of 1e-5."""


@dataclass(frozen=True, slots=True)
class Found:
    """The norm of the second update's gradient, and bytes of the device that it needed."""

    norm: float
    peak: int | None


def run(bench: Bench) -> None:
    widths = replace(shallow(bench.pick(QWEN_3B, TRY), bench.pick(LAYERS, 2)), vocabulary=600)
    model = write(bench, bench.folder / "model", widths, vision=False)
    training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
    found: dict[str, Found] = {}
    for what in ("none", "optimizer", "parameters"):
        bench.attempt(f"offload: {what}", partial(_update, bench, training, what, found))
    if len(found) > 1:
        bench.attempt("one gradient", partial(_compare, bench, found))


def _update(bench: Bench, training: Training, what: str, found: dict[str, Found], name: str) -> Row:
    import psutil

    before = psutil.virtual_memory().available
    run = training.start(training.config(learner={"offload": what, "zero_stage": 3, "lr": 1e-5}))
    first = run.update()
    norms: list[float] = []
    peak = bench.peak_bytes(lambda: norms.append(run.update().metrics["policy/grad_norm"]))
    if first.fault or first.notice:
        raise RuntimeError(first.fault or first.notice)
    taken = before - psutil.virtual_memory().available
    seconds = bench.all_seconds(run.update, 1)[0]
    run.release()
    found[what] = Found(norms[0], peak)
    value = f"{seconds:.3g} s, peak {gigabytes(peak)}, the host has {gigabytes(max(taken, 0))} less"
    planned = training.forecast(run.plan.config, "host").get("learner", 0)
    return bench.row(name, value, why=f"planned for what is offloaded: {gigabytes(planned)}")


def _compare(bench: Bench, found: Mapping[str, Found], name: str) -> Row:
    norms: dict[str, Any] = {what: each.norm for what, each in found.items()}
    far = max(norms.values()) / min(norms.values()) - 1
    value = f"{far:.2%} apart ({'; '.join(f'{what} {norm:.5g}' for what, norm in norms.items())})"
    return bench.row(name, value, good=math.isfinite(far) and far <= NORM_LIMIT, why=f"limit {NORM_LIMIT:.0%}")
