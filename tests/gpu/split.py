"""Two ranks, each with a device of its own, of which one samples and the other learns, in two worlds.

The weights' group between them is NCCL's on GPUs. The sampler of each version is compared with the learner of the same
one, so a transfer that lost, mixed or rounded a weight is seen; and an old version is taken after newer ones.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from tests.gpu.bench import Bench
from tests.gpu.published import QWEN_3B, TRY, Training, rows_of, shallow, write, write_prompts
from tests.gpu.ranks import LAYERS, LOAD, ranks_of
from tests.gpu.row import Row

VERSIONS = 3
"""Weights that are sampled from: the first ones, and those of each update."""


def run(bench: Bench) -> None:
    from mmrl.cluster import ray_ranks

    widths = shallow(bench.pick(QWEN_3B, TRY), bench.pick(LAYERS, 2))
    model = write(bench, bench.folder / "model", widths, vision=False)
    training = Training(bench, model, write_prompts(bench.folder / "data", LOAD), LOAD)
    ray_ranks.RayRanks = partial(ranks_of, bench.kind)  # type: ignore[assignment,misc]
    for lag in (0, 1):
        bench.attempt(f"two worlds, a lag of {lag}", partial(_follow, bench, training, lag))


def _follow(bench: Bench, training: Training, lag: int, name: str) -> Row:
    """Sample each version that the learner publishes, ``lag`` updates later, and compare the two."""
    from mmrl.cluster.launch import start_engine
    from mmrl.ops.parity import LIMITS, Gap
    from mmrl.runs.setup import RunSetup

    cluster = {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}
    config = training.config(learner={"lr": 1e-4}, cluster=cluster, trainer={"staleness": lag})
    setup = RunSetup(config, bench.folder / f"media-split-{lag}")
    engine = start_engine(replace(setup.engine_spec(setup.algorithm, None), with_sampler=True))
    gaps, seconds, scores = list[Any](), list[float](), dict[int, Any]()
    try:
        rows = rows_of(setup, LOAD)
        for number in range(VERSIONS + lag):
            version = engine.publish()
            with engine.learning() as learner:
                scores[number] = learner.network("policy").score([row.sample for row in rows])
            if number >= lag:
                gaps.append(_gap(engine, version - lag, rows, seconds))
            if number < VERSIONS + lag - 1:
                with engine.learning() as learner:
                    learner.network("policy").update(rows)
    finally:
        engine.close()
    found = [Gap.between(scores[number], gap) for number, gap in enumerate(gaps)]
    moved = Gap.between(scores[0], scores[VERSIONS - 1])
    worst = max(found, key=lambda gap: gap.abs_mean)
    value = f"sampler and learner at most {worst.abs_mean:.1e} nats apart on average in {VERSIONS} versions that are "
    value += f"{moved.abs_mean:.1e} apart; new weights are there after {max(seconds[1:]):.3g} s at most"
    sound = all(gap.verdict(LIMITS["bfloat16"]) == "ok" for gap in found)
    return bench.row(name, value, good=sound and moved.abs_mean > 2 * worst.abs_mean)


def _gap(engine: Any, version: int, rows: Any, seconds: list[float]) -> Any:
    """The sampler's log-probs of the rows' tokens, with weights of a version."""
    begin = time.perf_counter()
    with engine.sampling(version) as sampler:
        seconds.append(time.perf_counter() - begin)
        (found,) = sampler.score([row.sample for row in rows], 1.0)
        return found
