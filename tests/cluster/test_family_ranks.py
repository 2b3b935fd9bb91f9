"""Every family on two ranks that share a sampler and are partitioned by ZeRO 3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import SamplingRequest
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Rollout
from mmrl_algorithms.grpo import GRPO
from tests.engine.test_learner import EXPOSED, SMALL, gradients, norm
from tests.proofs import families, has

pytestmark = pytest.mark.slow
LENGTHS = (4, 19, 7, 3, 11, 24, 6)


@dataclass(frozen=True)
class Update:
    """One update on two ranks, and what they sampled before and after it.

    Attributes:
        gradient: Of the update.
        gaps: Largest difference of sampler and learner, nats: before, after the update, and if the sampler had not
            got the new weights.
    """

    gradient: dict[str, torch.Tensor]
    gaps: tuple[float, float, float]


def gap(learner: Any, rollouts: list[Rollout]) -> float:
    own = learner.network("policy").score(rollouts)
    return max(float(np.abs(r.sampler_logprobs - values).max()) for r, values in zip(rollouts, own, strict=True))


@pytest.fixture(scope="module")
def updated(bench: Callable[..., Any], start_ranks: Callable[[EngineSpec], Any]) -> Callable[[str], Update]:
    """A family's update, carried out when it is first asked for."""

    @functools.cache
    def carry_out(family: str) -> Update:
        setting, shared = bench(family), has(family, "vllm") and has(family, "tensor_parallel")
        sampler = {"engine": {"kv_cache_memory_bytes": 2**26}, "tensor_parallel_size": 2} if shared else {"name": "hf"}
        learner = {"max_grad_norm": 1e9, "lr": 2e-3, "zero_stage": 3, "tokens_per_microbatch": 60}
        learner["deepspeed"] = EXPOSED | {"zero_optimization": SMALL}
        cluster = {"name": "ray", "ranks": 2}
        config = setting.config(learner=learner, cluster=cluster, sampler=sampler)
        spec = EngineSpec(config, setting.folder, setting.media, GRPO(GRPO.Config()), 2, with_sampler=True)
        requests = [SamplingRequest(prompt, 2, 0.8, 16, i << 16) for i, prompt in enumerate(setting.prompts)]
        group = start_ranks(spec)

        def sample() -> list[Rollout]:
            with group.sampling() as sampler:
                return [rollout for _, done in sampler.generate(requests) for rollout in done.rollouts]

        try:
            first = sample()
            with group.learning() as learner:
                before = gap(learner, first)
                learner.network("policy").update(rows_of(setting))
                gradient, stale = gradients(group), gap(learner, first)
            second = sample()
            with group.learning() as learner:
                return Update(gradient, (before, gap(learner, second), stale))
        finally:
            group.close()

    return carry_out


def rows_of(setting: Any) -> list[Any]:
    samples = setting.samples(LENGTHS)
    masks = [sample.mask for sample in samples]
    advantages = [np.full(n, (-1.0) ** n * n / 9) for n in LENGTHS]
    return list(
        training_rows(
            samples, masks, {"advantages": advantages}, np.arange(7), Aggregation("token-mean"), range(7)
        ).values()
    )


@pytest.mark.proves("tensor_parallel")
@pytest.mark.parametrize("family", families("tensor_parallel", "vllm"))
def test_a_sampler_on_two_ranks_agrees_with_the_learner_before_and_after_an_update(family, updated):
    before, after, stale = updated(family).gaps
    assert before < 1e-4 and after < 1e-4 and stale > 1e-2


@pytest.mark.proves("zero_3")
@pytest.mark.parametrize("family", families("zero_3"))
def test_two_ranks_at_zero_3_find_the_gradient_of_one(family, updated, bench, plain):
    setting = bench(family)
    found, reference = updated(family).gradient, plain(setting.folder.path)
    for row in rows_of(setting):
        logprobs = reference.logprobs(row.sample, setting.media)
        (-float(row.advantages[0]) / sum(LENGTHS) * logprobs.sum()).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in reference.model.named_parameters()
        if setting.folder.family.uses(name)
    }
    assert found.keys() == expected.keys()
    assert norm({name: found[name] - expected[name] for name in expected}) < 1e-5 * norm(expected)
