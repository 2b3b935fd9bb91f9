"""Seconds of a step, estimated from two small ones that are taken: one prompt, then a few."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from mmrl.cluster.launch import start_engine
from mmrl.commands.alternating import alternating
from mmrl.commands.plan.workload import Workload
from mmrl.config.cluster import ClusterConfig
from mmrl.config.sections import Config
from mmrl.engine.trained_sizes import TrainedSize, update_flops
from mmrl.engine_api import Engine, SamplingRequest
from mmrl.rollout.batch import rollouts_of
from mmrl.runs.setup import RunSetup
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.step.views import ViewMaker
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt

PROMPTS = 16
"""Prompts of the larger of the two small steps, at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of two small steps of one rank.

    Attributes:
        prompts: Prompts of the larger one.
        completion_tokens: Mean length of its completions.
        sync_s: Seconds of a weight sync.
        generate_s: Seconds to sample it.
        logprob_s: Seconds of its log-probs before the update.
        update_flops_per_s: Operations a second of forward and backward.
        optimizer_s: Seconds of an optimizer step that do not grow with its rows.
        update_flops: Operations of its optimizer steps.
    """

    prompts: int
    completion_tokens: float
    sync_s: float
    generate_s: float
    logprob_s: float
    update_flops_per_s: float
    optimizer_s: float
    update_flops: float


@dataclass(frozen=True, slots=True)
class Seconds:
    """Estimates of a whole step."""

    sync: float
    generate: float
    logprob: float
    update: float

    @property
    def step(self) -> float:
        """All phases, without scoring, which runs meanwhile, and the driver's work between them."""
        return self.sync + self.generate + self.logprob + self.update


def calibrate(config: Config, setup: RunSetup) -> Measured:
    """Start one rank's engine here and take two small steps after one to warm up, with rewards that alternate.

    Raises:
        MMRLError: The engine cannot start, or the algorithm fails.
    """
    alone = config.model_copy(
        update={
            "cluster": ClusterConfig(),
            "learner": config.learner.model_copy(update={"sequence_parallel_size": 1}),
            "sampler": config.sampler.model_copy(update={"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
        }
    )
    count = min(PROMPTS, -(-config.trainer.prompts_per_step // config.cluster.num_learner_ranks))
    spec = setup.engine_spec(setup.algorithm)
    engine = start_engine(replace(spec, config=alone, with_sampler=setup.step_source.samples))
    try:
        views = ViewMaker(alone, setup.algorithm, setup.encoder)
        prompts = [views(prompt, 1) for prompt in setup.prompts.each(setup.encoder.encode, count)]
        _step(alone, setup, engine, prompts[:1])  # warms up
        small, large = (_step(alone, setup, engine, part) for part in (prompts[:1], prompts))
    finally:
        engine.close()
    updates = config.learner.minibatches * config.learner.epochs
    return _fit(small, large, len(prompts), updates)


@dataclass(frozen=True, slots=True)
class _Step:
    metrics: dict[str, float]
    completion_tokens: float

    def seconds(self, phase: str) -> float:
        return self.metrics.get(f"perf/{phase}_s", 0.0)

    @property
    def flops(self) -> float:
        """With a peak of 1, ``perf/mfu`` is operations a second."""
        return self.metrics["perf/mfu"] * self.seconds("update")


def _step(config: Config, setup: RunSetup, engine: Engine, prompts: Sequence[EncodedPrompt]) -> _Step:
    clock = Clock()
    step = 1 + (0 if config.critic is None else config.critic.pretrain_steps)  # of those in which the policy learns
    if setup.step_source.samples:
        with ExitStack() as stack:
            with clock.phase("sync"):
                sampler = stack.enter_context(engine.sampling())
            with clock.phase("generate"):
                groups = dict(sampler.generate([_request(config, prompt) for prompt in prompts]))
        greedy = setup.algorithm.needs().greedy_rollout
        names = [spec.metric for spec in config.rewards]
        scored = [alternating(groups[index], names, greedy=greedy) for index in range(len(prompts))]
    else:
        needs = setup.algorithm.needs()
        scored = [setup.step_source.group(prompt, needs, setup.encoder) for prompt in prompts]
    with engine.learning() as learner:
        learning = learn(scored, setup.algorithm, learner, LearnSettings.of(config, setup.penalties, step))
        finished(learning, clock=clock)
    lengths = [len(rollout.token_ids) for rollout in rollouts_of(scored)]
    return _Step(clock.metrics(sum(lengths), 1.0), float(np.mean(lengths)))


def _request(config: Config, prompt: EncodedPrompt) -> SamplingRequest:
    sampler = config.sampler
    return SamplingRequest(prompt, sampler.group_size, sampler.temperature, sampler.max_new_tokens, seed=1)


def _fit(small: _Step, large: _Step, prompts: int, updates: int) -> Measured:
    """Fit a line through both steps' updates: a rate of operations, and fixed seconds."""
    seconds, flops = large.seconds("update"), large.flops
    rate, fixed = flops / seconds, 0.0
    if flops > small.flops and seconds > small.seconds("update"):
        slope = (seconds - small.seconds("update")) / (flops - small.flops)
        rate, fixed = 1 / slope, max(seconds - slope * flops, 0.0) / updates
    return Measured(
        prompts,
        large.completion_tokens,
        large.seconds("sync"),
        large.seconds("generate"),
        large.seconds("logprob"),
        rate,
        fixed,
        flops,
    )


def estimate(config: Config, networks: Sequence[TrainedSize], work: Workload, found: Measured) -> Seconds:
    """Seconds of a whole step, on as many ranks as the config has.

    Args:
        networks: Those that are trained, each on every row.
        work: Workload of a step with completions of the measured length. Ranks that share a row share its operations
            evenly; what they exchange is not counted.
    """
    cluster = config.cluster
    sampled, learned = (
        config.trainer.prompts_per_step / (ranks * found.prompts)
        for ranks in (cluster.num_sampler_ranks, cluster.num_learner_ranks)
    )
    slowest = max(sum(update_flops(networks, part.row) / part.size for part in rows) for rows in work.rows)
    update = work.updates * (slowest / found.update_flops_per_s + found.optimizer_s)
    return Seconds(found.sync_s, found.generate_s * sampled, found.logprob_s * learned, update)
