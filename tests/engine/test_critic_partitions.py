"""A critic's loss and gradient are the same in any micro-batches, on any ranks, and where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl.engine.spec import EngineSpec
from tests.engine.critic_runs import sections_of, take
from tests.engine.critics import OPTIONS, critic_rows, samples_of, valued

EXPOSED = {"optimizer": {"params": {"betas": [0.0, 0.999]}}}
"""AdamW without memory: its first moment is the gradient, and a checkpoint has it."""
BUDGETS = {1: 4096, 2: 300, 4: 130}
"""Tokens of a micro-batch by the number of micro-batches."""


def gradient_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The critic's, from the first moments in a checkpoint, in float64."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for file in (checkpoint / "critic/state").glob("optimizer-*.safetensors"):
        for key, values in load_file(file).items():
            kind, name, start = key.split("/")
            if kind == "exp_avg":
                pieces.setdefault(name, {})[int(start)] = values.double()
    return {name: torch.cat([own[start] for start in sorted(own)]) for name, own in pieces.items()}


def norm(gradient: Mapping[str, torch.Tensor]) -> float:
    return float(torch.stack([values.norm() for values in gradient.values()]).norm())


@pytest.fixture(scope="module")
def taken(start: Any, start_ranks: Any, vision: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The metrics, values and gradient of one update that moves nothing."""

    def take(microbatches: int, ranks: int, stage: int) -> Any:
        learner = {"zero_stage": stage, "tokens_per_microbatch": BUDGETS[microbatches], "max_grad_norm": 1e9}
        sections: dict[str, Any] = {"learner": {**learner, "deepspeed": EXPOSED}}
        sections["critic"] = {"lr": 1e-30, "head": "normal"}
        folder, samples = tmp_path_factory.mktemp("taken"), samples_of(vision)
        if ranks == 1:
            engine = start(algorithm=valued(), **sections)
        else:
            config = vision.config(**sections, algorithm=OPTIONS, cluster={"name": "ray", "ranks": ranks})
            engine = start_ranks(EngineSpec(config, vision.folder, vision.media, valued(), 2, with_sampler=False))
        try:
            with engine.learning() as learner:
                critic = learner.network("critic")
                if ranks == 1:
                    assert len(critic._batches.plan(samples, BUDGETS[microbatches])) == microbatches
                result = critic.update(critic_rows(samples))
                learner.save(folder)
        finally:
            if ranks > 1:
                engine.close()
        return result, gradient_in(folder)

    return take


CASES = [
    (2, 1, 0),
    (4, 1, 0),
    *(pytest.param(*case, marks=pytest.mark.full) for case in ((4, 2, 0), (2, 2, 3))),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2, 0), (4, 1, 3))),
]


@pytest.fixture(scope="module")
def whole(taken: Callable[..., Any]) -> Any:
    """The critic's update of one micro-batch on one rank, which all others must equal."""
    return taken(1, 1, 0)


@pytest.mark.parametrize(("microbatches", "ranks", "stage"), CASES)
def test_loss_and_gradient_are_those_of_one_microbatch_on_one_rank(microbatches, ranks, stage, taken, whole):
    (result, gradient), (expected, of_one) = taken(microbatches, ranks, stage), whole
    assert expected.metrics["critic/loss"] > 0.1 and len(gradient) == len(of_one) > 50
    for name in ("critic/loss", "critic/grad_norm", "critic/clip_fraction"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-6)
    error = norm({name: gradient[name] - values for name, values in of_one.items()}) / norm(of_one)
    assert error < 1e-6
    for mine, its in zip(result.statistics, expected.statistics, strict=True):
        np.testing.assert_allclose(mine.vpreds, its.vpreds, atol=1e-5)
        assert not len(mine.logprobs)


def test_out_of_memory_halves_the_microbatches_of_both_networks_once(start, vision, monkeypatch):
    samples = samples_of(vision)
    rows = critic_rows(samples)
    sections: dict[str, Any] = {
        "learner": {"zero_stage": 0, "tokens_per_microbatch": BUDGETS[2]},
        "critic": {"head": "normal"},
    }
    with start(algorithm=valued(), **sections).learning() as learner:
        expected = learner.network("critic").update(rows)
    with start(algorithm=valued(), **sections).learning() as learner:
        critic = learner.network("critic")
        calls = []

        def fail_once(module: Any, args: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        critic.policy.register_forward_pre_hook(fail_once)
        result = critic.update(rows)
        budget = learner.network("policy")._batches.budget
        assert critic._batches.budget is budget and budget.tokens == 150
        assert "out of memory in the critic's update" in result.notice and "is 150 from now on" in result.notice
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert learner.weight_version == 0 and critic.optimizer_steps == 1


def test_a_loss_that_is_not_finite_moves_no_network(start, vision):
    samples = samples_of(vision)
    rows = critic_rows(samples)
    rows[3].columns["returns"][0] = np.inf
    with start(algorithm=valued(), learner={"zero_stage": 0}, critic={"head": "normal"}).learning() as learner:
        critic = learner.network("critic")
        before = [p.detach().clone() for p in critic.policy.parameters()]
        result = critic.update(rows)
        assert result.fault.startswith("the loss is not finite: prompt ids") and critic.optimizer_steps == 0
        assert all(torch.equal(p, own) for p, own in zip(critic.policy.parameters(), before, strict=True))
        assert not critic.update(critic_rows(samples)).fault


def test_values_are_the_same_one_by_one_and_none_are_asked_for(start, vision):
    samples = samples_of(vision)
    with start(
        algorithm=valued(), critic={"head": "normal"}, learner={"tokens_per_microbatch": 10}
    ).learning() as found:
        critic = found.network("critic")
        single, packed = critic.score(samples, way="single"), critic.score(samples)
        np.testing.assert_allclose(np.concatenate(single), np.concatenate(packed), atol=1e-5)
        assert [len(values) for values in packed] == [len(sample.token_ids) for sample in samples]
        assert critic.score(samples, way="wide") == [] == critic.score([])
        assert critic.final_values([]).shape == (0,)
        # A state is what its tokens say, whichever completion goes on from it.
        longer = samples[5]
        assert longer.num_tokens > 20
        (segment,) = longer.segments
        first = replace(segment, token_ids=segment.token_ids[:9], sampler_logprobs=segment.sampler_logprobs[:9])
        cut = replace(longer, segments=(first,))
        np.testing.assert_allclose(critic.final_values([cut])[0], packed[5][9], atol=1e-5)


@pytest.mark.full
def test_a_rank_without_rows_waits_for_the_other(start, start_ranks, vision):
    sections = sections_of("full", learner={"zero_stage": 3})
    config = vision.config(**sections, algorithm=OPTIONS, cluster={"name": "ray", "ranks": 2})
    samples = samples_of(vision)[:1]

    def asked(learner: Any) -> Any:
        critic = learner.network("critic")
        updates = [critic.update(critic_rows(samples, seed)) for seed in range(2)]
        return critic.score(samples)[0], critic.final_values(samples), updates

    engine = start_ranks(EngineSpec(config, vision.folder, vision.media, valued(), 2, with_sampler=False))
    try:
        with engine.learning() as learner:
            values, last, updates = asked(learner)
    finally:
        engine.close()
    with start(algorithm=valued(), **sections_of("full")).learning() as learner:
        *expected, of_one = asked(learner)
    np.testing.assert_allclose(values, expected[0], atol=1e-3)
    np.testing.assert_allclose(last, expected[1], atol=1e-3)
    for mine, its in zip(updates, of_one, strict=True):
        assert mine.metrics == pytest.approx(its.metrics, rel=1e-3, abs=1e-5)


@pytest.mark.full
def test_the_load_of_a_critics_experts_is_its_own_and_not_the_packings(start, bench):
    """``test_experts.py`` holds a sample's load against transformers'."""
    setting, found = bench("qwen3_moe"), []
    for tokens in (4096, 60):
        learner = {"router_aux_loss_coef": 0.05, "tokens_per_microbatch": tokens}
        found.append(take(start, setting, "full", "pc", learner=learner).metrics)
    for name in ("critic/loss", "critic/loss/router_aux", "critic/grad_norm"):
        assert found[0]["critic"][0][name] == pytest.approx(found[1]["critic"][0][name], rel=1e-5)
    (critic,), (policy,) = found[0]["critic"], found[0]["policy"]
    assert critic["critic/loss/router_aux"] > 0.01 and "loss/router_aux" in policy and "loss/router_aux" not in critic


def test_the_policys_schedule_begins_after_the_steps_in_which_the_critic_alone_learns(start, vision):
    sections = {
        "trainer": {"steps": 4},
        "learner": {"lr": 0.1, "schedule": "linear", "warmup_steps": 0},
        "critic": {"lr": 0.2, "pretrain_steps": 2},
    }
    rates = take(start, vision, "lora", "ccpcpc", **sections).metrics
    assert [each["critic/lr"] for each in rates["critic"]] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert [each["lr"] for each in rates["policy"]] == pytest.approx([0.1, 0.05])
