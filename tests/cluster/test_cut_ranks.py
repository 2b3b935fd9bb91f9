"""Cut completions on real ranks: some that share a sampler, some with one each, and families without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Cut, Polled, Sampler, SamplingRequest
from mmrl.types import Rollout, Sample
from mmrl_algorithms.grpo import GRPO
from tests.cluster.test_family_ranks import rows_of
from tests.engine import episodes
from tests.proofs import has

pytestmark = pytest.mark.full
CACHE = {"engine": {"kv_cache_memory_bytes": 2**26}}
TOKENS = 12
TRIED = ("internvl", "qwen3_moe", "qwen2_5_vl")


@contextmanager
def ranks(setting: Any, start_ranks: Callable[[EngineSpec], Any], count: int, *, trains: bool, **sampler: Any) -> Any:
    model = {"dtype": "float32" if has(setting.folder.family.model_type, "vllm") else "bfloat16"}
    cluster = {"name": "ray", "ranks": count}
    config = setting.config(model=model, learner={"lr": 2e-3}, cluster=cluster, sampler={**CACHE, **sampler})
    algorithm = GRPO(GRPO.Config()) if trains else None
    group = start_ranks(EngineSpec(config, setting.folder, setting.media, algorithm, 2, with_sampler=True))
    try:
        yield group
    finally:
        group.close()


def members(setting: Any, count: int = 2) -> list[SamplingRequest]:
    """Requests of different lengths, those of later prompts longer."""
    found = []
    for place, prompt in enumerate(setting.prompts):
        for member in range(count):
            length, seed = TOKENS + 4 * place - 3 * member, (9 * place + member) << 16
            found.append(SamplingRequest(prompt, 1, episodes.TEMPERATURE, length, seed, may_be_cut=True))
    return found


def stopped(sampler: Sampler, steps: int, groups: int) -> tuple[list[Any], list[int]]:
    """Samples until the stop; returns (ticket, step, tokens) of what is finished, and the tickets that are over."""
    sampler.stop_after(steps, groups)
    finished, over = list[Any](), list[int]()
    while True:
        news = sampler.poll()
        finished += [(e.ticket, e.step, e.group.rollouts[0].token_ids.tolist()) for e in news.finished]
        over += news.over
        if news.stopped:
            assert sampler.poll() == Polled(stopped=True)
            return sorted(finished), sorted(over)


def tokens(cuts: list[Cut]) -> list[tuple[int, int, list[int]]]:
    return [(cut.ticket, cut.request.max_new_tokens, cut.request.token_ids.tolist()) for cut in cuts]


@pytest.mark.parametrize("sampler", [{"tensor_parallel_size": 2}, {}], ids=["tensor parallel", "one each"])
def test_two_ranks_stop_at_the_same_step_in_every_run_and_their_cuts_are_exact(sampler, vision, plain, start_ranks):
    reference = plain(vision.folder.path)
    with ranks(vision, start_ranks, 2, trains=False, **sampler) as group:
        found = []
        for _ in range(2):
            with group.sampling() as sampler:
                sampler.submit(members(vision))
                first = stopped(sampler, 5, 0)
                second = stopped(sampler, 0, 1)
                found.append((first, second, tokens(cuts := list(sampler.cut()))))
                assert sampler.poll() == Polled()
        assert found[1] == found[0]
        with group.sampling() as sampler:
            sampler.submit([replace(cut.request, seed=(99 + i) << 16) for i, cut in enumerate(cuts)])
            done = {each.ticket: each.group.rollouts[0] for _ in range(99) for each in sampler.poll().finished}
    (_, over), (late, _), _ = found[0]
    assert over == [] and late  # no group is over after five steps
    assert sorted(done) == list(range(len(cuts))) and len(cuts) >= 2
    for cut, rollout in zip(cuts, (done[i] for i in range(len(cuts))), strict=True):
        assert rollout.prompt is cut.request.prompt and rollout.segments[:-1] == cut.request.segments
        assert [s.continues for s in rollout.segments] == [False, True]
        expected = episodes.whole_logprobs(reference, rollout, vision.media)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4)


@pytest.fixture
def group(family: str, bench: Callable[..., Any], start_ranks: Callable[[EngineSpec], Any]) -> Iterator[Any]:
    with ranks(bench(family), start_ranks, 1, trains=True) as group:
        yield group


def mean_gap(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).mean())


@pytest.mark.parametrize(
    "family",
    [
        *("internvl", "qwen3_moe", "qwen3_5"),  # tests/engine/test_vllm_cuts.py has qwen2_5_vl
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if has(name, "vllm") and name not in TRIED),
    ],
)
def test_a_family_goes_on_under_other_weights_with_the_log_probs_of_both(family, bench, group):
    """Linear attention in bfloat16, and without a prefix cache, as vLLM has it on a CPU."""
    setting, bound = bench(family), 3e-5 if has(family, "vllm") else 3e-3

    def scores(samples: list[Any]) -> list[Any]:
        with group.learning() as learner:
            return learner.network("policy").score(samples)

    with group.sampling() as sampler:
        sampler.submit(members(setting, 1))
        assert stopped(sampler, 7, 0) == ([], [])
        requests = [cut.request for cut in sampler.cut()]
    begun = [Sample(each.prompt, each.segments) for each in requests]
    assert [len(sample.token_ids) for sample in begun] == [7] * len(setting.prompts)
    for sample, expected in zip(begun, scores(begun), strict=True):
        assert mean_gap(sample.sampler_logprobs, expected) < bound
    with group.learning() as learner:
        learner.network("policy").update(rows_of(setting))
    with group.sampling() as sampler:
        sampler.submit([replace(each, seed=(50 + i) << 16) for i, each in enumerate(requests)])
        done = {each.ticket: each.group.rollouts[0] for _ in range(99) for each in sampler.poll().finished}
    rollouts: list[Rollout] = [done[i] for i in range(len(requests))]
    for rollout, expected in zip(rollouts, scores(rollouts), strict=True):
        first, second = rollout.segments
        assert (first.weight_version, second.weight_version) == (0, 1) and second.continues
        assert mean_gap(second.sampler_logprobs, expected[7:]) < bound
        assert mean_gap(first.sampler_logprobs, expected[:7]) > 3 * bound  # other weights would be noticed
