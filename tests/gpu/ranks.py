"""Two ranks, each with a device of its own: one gradient, whether one rank learns, or two on rows of their own or on
shared ones, and sampler = learner.

The ranks are processes of this machine, so Ray need not be there; the driver's side is the one of a run on Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.gpu.bench import Bench
from tests.gpu.published import QWEN_3B, TRY, Load, Training, rows_of, shallow, write, write_prompts
from tests.gpu.row import Row

LOAD = Load(prompts=4, prompt_tokens=200, group=4, completion=40, budget=1000, image=None)
LAYERS = 2
SHARED = "ranks: 2 that share rows"
NORM_LIMIT = 0.05
"""Relative difference of the gradients' norms in bfloat16."""


def run(bench: Bench) -> None:
    widths = shallow(bench.pick(QWEN_3B, TRY), bench.pick(LAYERS, 2))
    model = write(bench, bench.folder / "model", widths, vision=False)
    training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
    found: list[Found] = []
    for name, ranks, size in (("ranks: 1", 1, 1), ("ranks: 2", 2, 1), (SHARED, 2, 2)):
        bench.attempt(name, partial(_learn, bench, training, ranks, size, found))
    if len(found) == 3:
        bench.attempt("one rank = two", partial(_compare, bench, found[:2]))
        bench.attempt("one rank = two that share rows", partial(_compare, bench, found[::2]))


@dataclass(frozen=True, slots=True)
class Found:
    """The norm of the first update's gradient, and log-probs after it."""

    norm: float
    logprobs: Sequence[Any]


def _learn(bench: Bench, training: Training, ranks: int, size: int, found: list[Found], name: str) -> Row:
    """Sample, compare with the learner, update; ``size`` ranks share each row."""
    from mmrl.cluster import ray_ranks
    from mmrl.cluster.launch import start_engine
    from mmrl.ops.parity import LIMITS, Gap
    from mmrl.runs.setup import RunSetup

    learner = {"zero_stage": 3, "lr": 1e-4, "sequence_parallel_size": size}
    config = training.config(learner=learner, cluster={"name": "ray", "ranks": ranks})
    setup = RunSetup(config, bench.folder / f"media-{ranks}-{size}")
    ray_ranks.RayRanks = partial(ranks_of, bench.kind)  # type: ignore[assignment,misc]
    engine = start_engine(replace(setup.engine_spec(setup.algorithm, None), with_sampler=True))
    try:
        rows = rows_of(setup, LOAD)
        with engine.sampling() as sampler:
            groups = dict(sampler.generate(requests_of(rows)))
        sampled = [rollout for index in sorted(groups) for rollout in groups[index].rollouts]
        with engine.learning() as learner:
            gap = Gap.between([each.sampler_logprobs for each in sampled], learner.network("policy").score(sampled))
            update = learner.network("policy").update(rows)
            seconds = bench.all_seconds(lambda: learner.network("policy").update(rows), 1)[0]
            found.append(
                Found(update.metrics["policy/grad_norm"], learner.network("policy").score([row.sample for row in rows]))
            )
    finally:
        engine.close()
    value = f"sampler and learner {gap.abs_mean:.1e} nats apart on average, an update takes {seconds:.3g} s"
    return bench.row(name, value, good=gap.verdict(LIMITS["bfloat16"]) == "ok")


def requests_of(rows: Sequence[Any]) -> list[Any]:
    """One for each prompt."""
    from mmrl.engine_api import SamplingRequest

    prompts = {id(row.sample.prompt): row.sample.prompt for row in rows}.values()
    return [SamplingRequest(prompt, 2, 1.0, LOAD.completion, seed << 16) for seed, prompt in enumerate(prompts)]


def ranks_of(kind: str, config: Any) -> Any:
    """Processes in the place of Ray's; on a GPU each sees its own."""
    from tests.cluster.process_ranks import ProcessRanks

    if kind == "cpu":
        return ProcessRanks(config)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if len(visible) >= config.num_ranks else list(map(str, range(config.num_ranks)))
    return ProcessRanks(config, [{"CUDA_VISIBLE_DEVICES": name} for name in names])


def _compare(bench: Bench, found: Sequence[Found], name: str) -> Row:
    from mmrl.ops.parity import LIMITS, Gap

    one, two = found
    far, gap = abs(two.norm / one.norm - 1), Gap.between(one.logprobs, two.logprobs)
    value = f"gradient norms {one.norm:.5g} and {two.norm:.5g}, log-probs after updates {gap.abs_mean:.1e} nats apart"
    good = far <= NORM_LIMIT and gap.verdict(LIMITS["bfloat16"]) == "ok"
    return bench.row(name, value, good=good, why=f"limit {NORM_LIMIT:.0%}")
