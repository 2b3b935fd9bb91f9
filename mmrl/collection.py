"""Scored rollouts from prompts: sample, and score each group while others are still generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from mmrl import metrics
from mmrl.clock import Clock
from mmrl.config import Config
from mmrl.interfaces import Engine, PromptEncoder, Sampler, SamplingRequest
from mmrl.prompts import PromptSource, request_seed
from mmrl.scoring import Scorer
from mmrl.types import Batch, ScoredGroup


class Collector:
    """Brings engine, encoder and scorer together.

    Args:
        progress: Called with a phase, what is done and the total.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        encoder: PromptEncoder,
        scorer: Scorer,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._config, self._engine, self._encoder = config, engine, encoder
        self._scorer, self._progress = scorer, progress

    def training_groups(self, source: PromptSource, rows: Sequence[tuple[int, int]], clock: Clock) -> list[ScoredGroup]:
        """One scored group for each (epoch, row), in that order."""
        sampler = self._config.sampler
        requests = [
            self._request(source, epoch, row, "", sampler.group_size, sampler.temperature) for epoch, row in rows
        ]
        return self._collect(requests, clock)

    def evaluate(self, source: PromptSource) -> dict[str, float]:
        """Metrics of all prompts: greedy with one sample each, else at the sampling temperature."""
        num_samples = self._config.trainer.eval_samples
        temperature = 0.0 if num_samples == 1 else self._config.sampler.temperature
        requests = [self._request(source, 0, row, "eval/", num_samples, temperature) for row in range(len(source))]
        batch = batch_of(self._collect(requests, Clock()))
        name = self._config.trainer.eval_metric or self._config.rewards[0].metric
        values = metrics.evaluation_metrics(batch.rewards, batch.valid, batch.components, name)
        lengths = metrics.length_metrics(batch.masks, batch.truncated)
        return values | {f"eval/{key}": value for key, value in lengths.items()}

    def _request(
        self, source: PromptSource, epoch: int, row: int, namespace: str, num_samples: int, temperature: float
    ) -> SamplingRequest:
        """``namespace`` keeps the seeds of evaluation apart from those of training."""
        prompt = self._encoder.encode(source[row])
        seed = request_seed(self._config.trainer.seed, epoch, namespace + prompt.id, 0)
        return SamplingRequest(prompt, num_samples, temperature, self._config.sampler.max_new_tokens, seed)

    def _collect(self, requests: Sequence[SamplingRequest], clock: Clock) -> list[ScoredGroup]:
        with ExitStack() as stack:
            with clock.phase("sync"):
                sampler = stack.enter_context(self._engine.sampling())
            return self._generate_and_score(sampler, requests, clock)

    def _generate_and_score(
        self, sampler: Sampler, requests: Sequence[SamplingRequest], clock: Clock
    ) -> list[ScoredGroup]:
        with clock.phase("generate"):
            futures = {}
            for index, group in sampler.generate(requests):
                futures[index] = self._scorer.submit(group)
                self._progress("generate", len(futures), len(requests))
        with clock.phase("score"):
            return [futures[index].result() for index in range(len(requests))]


def batch_of(groups: Sequence[ScoredGroup]) -> Batch:
    """The groups' rollouts as one batch, without learner log-probs yet."""
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    sizes = [len(group.group.rollouts) for group in groups]
    return Batch(
        rewards=np.concatenate([group.rewards for group in groups]),
        valid=np.concatenate([group.valid for group in groups]),
        group_ids=np.repeat(np.arange(len(groups)), sizes),
        masks=[rollout.mask for rollout in rollouts],
        truncated=np.array([rollout.finish_reason == "length" for rollout in rollouts]),
        components={
            name: np.concatenate([group.components[name] for group in groups]) for name in groups[0].components
        },
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[rollout.sampler_logprobs for rollout in rollouts],
    )
