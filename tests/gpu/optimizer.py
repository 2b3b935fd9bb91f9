"""AdamW's step on the device, as loops of tensors and fused; and in the host's memory with few and many threads."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

from tests.gpu.bench import Bench, gigabytes, milliseconds
from tests.gpu.published import QWEN_3B, TRY, Load, Training, shallow, write, write_prompts
from tests.gpu.row import Row

LOAD = Load(prompts=1, prompt_tokens=60, group=2, completion=6, budget=160, image=None)
LIMIT = 1e-5
"""Largest difference of weights after three steps of 0.01: an order of operations apart."""


def run(bench: Bench) -> None:
    widths = bench.pick(replace(shallow(QWEN_3B, 4), vocabulary=600), TRY)
    weights: dict[str, Any] = {}
    for way in ("foreach", "fused"):
        bench.attempt(f"AdamW, {way}", partial(_step, bench, widths, way, weights))
    if len(weights) == 2:
        bench.attempt("AdamW, foreach = fused", partial(_compare, bench, weights))
    model = write(bench, bench.folder / "model", widths, vision=False)
    training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
    bench.attempt("AdamW in the host's memory", partial(_offloaded, bench, training))


def _step(bench: Bench, widths: Any, way: str, weights: dict[str, Any], name: str) -> Row:
    """float32 weights, with the settings that the learner would give."""
    import torch

    from mmrl.config.sections import LearnerConfig
    from mmrl.engine.learner.learner_settings import deepspeed_settings

    settings = deepspeed_settings(LearnerConfig(zero_stage=1, lr=1e-2), "bfloat16", bench.kind)["optimizer"]["params"]
    options = {key: value for key, value in settings.items() if key not in ("torch_adam", "fused", "foreach")}
    generator = torch.Generator(bench.device).manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device=bench.device, generator=generator)

    shapes = [
        (widths.hidden, widths.mlp),
        (widths.mlp, widths.hidden),
        (widths.hidden, widths.hidden),
        (widths.hidden,),
    ]
    parameters = [torch.nn.Parameter(drawn(*shape)) for _ in range(4 * widths.layers) for shape in shapes]
    for parameter in parameters:
        parameter.grad = drawn(*parameter.shape)
    optimizer = torch.optim.AdamW(parameters, **options, **{way: True})
    for _ in range(3):
        optimizer.step()
    weights[way] = [parameter.detach().clone() for parameter in parameters[-4:]]
    count = sum(parameter.numel() for parameter in parameters)
    peak, seconds = bench.peak_bytes(optimizer.step), bench.seconds(optimizer.step)
    return bench.row(name, f"{milliseconds(seconds)} for {count / 1e9:.2g} G weights, peak {gigabytes(peak)}")


def _compare(bench: Bench, weights: dict[str, Any], name: str) -> Row:
    pairs = zip(weights["foreach"], weights["fused"], strict=True)
    far = max(float((a - b).abs().max()) for a, b in pairs)
    return bench.row(name, f"{far:.1e} apart after three steps", good=far <= LIMIT, why=f"limit {LIMIT:g}")


def _offloaded(bench: Bench, training: Training, name: str) -> Row:
    """Updates of a few tokens, which are the optimizer's step and little else."""
    import torch

    run = training.start(training.config(learner={"offload": "optimizer", "zero_stage": 1}))
    found, before = [], torch.get_num_threads()
    for threads in dict.fromkeys((1, min(16, os.cpu_count() or 1))):
        torch.set_num_threads(threads)
        found.append(f"{bench.seconds(run.update, 2):.3g} s with {threads} threads")
    torch.set_num_threads(before)
    run.release()
    count = sum(trained for trained, _ in run.plan.part_sizes.values())
    return bench.row(name, f"{', '.join(found)} for {count / 1e9:.2g} G weights; by default {before} threads")
