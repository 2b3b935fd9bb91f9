"""Training steps of tiny models at ZeRO 3 with the ``hf`` sampler: ``mmrl doctor``'s trial, sampler = learner.

In bfloat16 with adapters too, and with adapters as young as after one step of an example's rate, when rounding takes
most of them away: the learner has to be the policy that the sampler got.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.gpu.bench import Bench, lacks_image_features
from tests.gpu.row import Row

FAMILIES = {"qwen2": "text", "qwen2_5_vl": "vision"}
LORA = {"rank": 8, "alpha": 16}
ADAPTERS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "LoRA": ({"lora": LORA}, ("peft",)),
    "QLoRA": ({"lora": LORA, "quantize": "nf4"}, ("peft", "bitsandbytes")),
}
"""What differs in the model's section, and the packages that it needs."""
YOUNG_RATE = 2e-5
"""AdamW's first step moves each element of B by this much."""
WIDER = 3.0
"""A young adapter's gap may be this many times the base model's, which is the noise of rounding."""
LEAST_NOISE = 3e-4
"""Nats that count as the base model's gap where it is smaller by chance: 5e-5 and 6e-4 were seen of tiny models."""


def run(bench: Bench) -> None:
    for family, what in FAMILIES.items():
        if what == "vision" and (reason := lacks_image_features()):
            bench.skip("vision: two steps", reason)
            continue
        for precision in ("float32", "bfloat16"):
            _try(bench, what, precision, family)
    family = "qwen2" if lacks_image_features() else "qwen2_5_vl"
    for what, (model, needs) in ADAPTERS.items():
        if absent := [name for name in needs if importlib.util.find_spec(name) is None]:
            bench.skip(f"{what}: two steps", f"not installed: {', '.join(absent)}")
            continue
        _try(bench, what, "bfloat16", family, {"model": model, "learner": {"lr": 3e-2}})
        bench.attempt(f"{what}: after a small step", partial(_young, bench, family, model))


def _try(
    bench: Bench, what: str, precision: str, family: str, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    from mmrl.commands.doctor.trial import Trial

    def emit(finding: Any) -> None:
        bench.emit(row_of(bench, f"{what}: ", finding))

    folder, options = bench.folder / what / precision, {"family": family, "sampler": "hf", "is_last": False}
    folder.mkdir(parents=True)
    Trial(precision, bench.kind, folder, emit, **options, settings=settings).run()
    bench.free()


def _young(bench: Bench, family: str, model: Mapping[str, Any], name: str) -> Row:
    """The gap between sampler and learner before the first step, when the adapter adds nothing, and after it."""
    from mmrl.commands.doctor.tiny_run import TEMPERATURE, TinyRun, take_step
    from mmrl.ops.metrics import ADAPTER_KEPT
    from mmrl.ops.parity import Gap

    folder = bench.folder / name
    folder.mkdir()
    settings = {"model": model, "learner": {"lr": YOUNG_RATE}}
    trial = TinyRun.start(folder, bench.kind, "bfloat16", family=family, sampler="hf", settings=settings)
    gaps, kept = list[Gap](), float("nan")
    for seed in (1, 2):
        with trial.engine.sampling() as sampler:
            groups = dict(sampler.generate(trial.requests(TEMPERATURE, 8, seed)))
        rollouts = [rollout for index in sorted(groups) for rollout in groups[index].rollouts]
        with trial.engine.learning() as learner:
            sampled = [rollout.sampler_logprobs for rollout in rollouts]
            gaps.append(Gap.between(sampled, learner.network("policy").score(rollouts)))
            kept = take_step(rollouts, learner).get(ADAPTER_KEPT, kept)
    return judged(bench, name, *gaps, kept)


def judged(bench: Bench, name: str, base: Any, young: Any, kept: float) -> Row:
    """The row of two gaps, and of the share that rounding leaves of the adapter; NaN if that is not known."""
    from mmrl.ops.parity import LIMITS

    value = (
        f"sampler and learner {young.abs_mean:.1e} nats apart on average, {base.abs_mean:.1e} before it; "
        f"{kept:.0%} of the adapter is left by rounding"
    )
    good = (
        young.verdict(LIMITS["bfloat16"]) == "ok"
        and young.abs_mean <= WIDER * max(base.abs_mean, LEAST_NOISE)
        and 0 < kept < 2
    )
    return bench.row(name, value, good=good, why=f"limits: {WIDER:g} times the gap before it, more than none left")


def row_of(bench: Bench, prefix: str, finding: Any) -> Row:
    """A finding of the doctor; a warning is no fault, and says what is unusual."""
    if finding.check.endswith("not run"):
        return Row(bench.area, prefix + finding.check, "skipped", finding.found, "a stage before these is bad")
    return bench.row(prefix + finding.check, finding.found, good=finding.status != "bad", why=finding.remedy)
