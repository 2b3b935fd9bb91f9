"""Preferences in the real learner: the gradient of plain passes of single completions, however it is partitioned."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid

from mmrl.config.plugin_specs import PluginSpec
from mmrl.engine.spec import EngineSpec
from mmrl.ops.assignment import assign_credit, loss_masks
from mmrl.ops.credit import mismatched_kl
from mmrl.ops.objective import training_rows
from mmrl.plugin_host import registry
from mmrl.rollout.batch import batch_of
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.step.mismatched import mismatched_logprobs
from mmrl.types import RolloutGroup, ScoredGroup
from tests.engine.test_learner import EXPOSED, STILL, first_moment, gradients
from tests.engine.test_learner import norm as size_of

FULL = pytest.mark.full
LENGTHS = (4, 19, 7, 3, 11, 24)
"""Of two completions of each of three prompts, the first of each, then the second of each."""
BETA = 0.5
DPO = {"name": "import:mmrl_algorithms.dpo:DPO", "beta": BETA}
KTO = {"name": "import:mmrl_algorithms.kto:KTO"}


def algorithm_of(options: dict[str, Any]) -> Any:
    return registry.create("algorithm", PluginSpec.model_validate(options))


def settings(stage: int, budget: int) -> dict[str, Any]:
    learner = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    return {**learner, "tokens_per_microbatch": budget}


@pytest.fixture(scope="module")
def groups(vision) -> list[ScoredGroup]:
    """Three prompts, with and without images; the second completion of the middle one is the better."""
    assert len(vision.prompts) == 3 and any(prompt.images for prompt in vision.prompts)
    samples = vision.samples(LENGTHS)
    scores = [np.array(each) for each in ([1.0, 0.0], [0.0, 2.0], [1.0, 0.5])]
    return [
        ScoredGroup(RolloutGroup(pair[0].prompt, pair), score, np.ones(2, bool), {"score": score})
        for pair, score in zip(zip(samples[:3], samples[3:], strict=True), scores, strict=True)
    ]


@pytest.fixture(scope="module")
def pairs(groups, vision, plain) -> SimpleNamespace:
    """Rows of the pairs with a reference of made-up numbers; the gradient of the mean over pairs, and its losses."""
    rng, plainly = np.random.default_rng(1), plain(vision.folder.path)
    batch, samples = batch_of(groups, {"score": 1.0}), [each for group in groups for each in group.rollouts]
    credit = assign_credit(algorithm_of(DPO), batch)
    references = [rng.normal(-6, 0.3, len(sample.token_ids)).astype(np.float32) for sample in samples]
    columns = {"advantages": [np.zeros(len(each)) for each in references], "reference_logprobs": references}
    rows = training_rows(
        samples, loss_masks(batch, credit), columns, batch.group_ids, algorithm_of(DPO).aggregation,
        range(len(samples)), scores=batch.rewards, whole_groups=True,
    )  # fmt: skip
    plainly.model.zero_grad()
    losses = []
    for chosen, rejected in ((0, 1), (3, 2), (4, 5)):
        x_c, x_j = (
            (plainly.logprobs(samples[i], vision.media) - torch.from_numpy(references[i])).sum()
            for i in (chosen, rejected)
        )
        loss = -logsigmoid(BETA * (x_c - x_j))
        (loss / 3).backward()
        losses.append(loss.item())
    named = plainly.model.named_parameters()
    gradient = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}
    return SimpleNamespace(rows=list(rows.values()), gradient=gradient, loss=np.mean(losses))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    own = {name: expected[name] for name in found}
    assert size_of({name: found[name] - own[name] for name in own}) < 1e-5 * size_of(own)


@pytest.mark.parametrize(("budget", "parts"), [(4096, 1), pytest.param(100, 2, marks=FULL), (10, 3)])
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=FULL)])
def test_pairs_that_share_a_row_have_the_gradient_of_plain_passes(stage, budget, parts, start, pairs):
    """A budget below one pair makes each a micro-batch of its own."""
    with start(algorithm=algorithm_of(DPO), learner=settings(stage, budget)).learning() as learner:
        result = learner.network("policy").update(pairs.rows)
        assert_close(first_moment(learner), pairs.gradient)
    assert result.metrics["loss/preference"] == pytest.approx(pairs.loss, rel=1e-5)
    assert result.metrics["perf/microbatches"] == parts


@FULL
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_find_the_gradient_of_plain_passes(stage, vision, start_ranks, pairs):
    config = vision.config(learner=settings(stage, 10), cluster={"name": "ray", "ranks": 2}, algorithm=DPO)
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, algorithm_of(DPO), 2, with_sampler=False))
    try:
        with group.learning() as learner:
            result = learner.network("policy").update(pairs.rows)
            assert_close(gradients(group), pairs.gradient)
        assert result.metrics["loss/preference"] == pytest.approx(pairs.loss, rel=1e-5)
    finally:
        group.close()


@FULL
def test_two_ranks_find_the_z0_of_one(vision, start, start_ranks, groups):
    """After an update, as z0 is 0 before it."""
    algorithm, moves = algorithm_of(KTO), {"lr": 1e-2, "zero_stage": 0}
    samples, needs = [each for group in groups for each in group.rollouts], algorithm.needs()

    def taken(learner: Any) -> tuple[float, Any]:
        """The mean of the second step, and the mismatched log-probs that it is of."""
        assert finished(learn(groups, algorithm, learner, LearnSettings())).credit.constants["z0"] < 1e-5
        batch = batch_of(groups, {"score": 1.0})
        found = mismatched_logprobs(batch, samples, needs, learner)
        for name, values in found.items():
            object.__setattr__(batch, name, values)
        return mismatched_kl(batch, batch.valid), found

    with start(algorithm=algorithm, learner=moves).learning() as learner:
        one, of_one = taken(learner)
    config = vision.config(learner=moves, cluster={"name": "ray", "ranks": 2}, algorithm=KTO)
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, algorithm, 2, with_sampler=False))
    try:
        with group.learning() as learner:
            two, of_two = taken(learner)
    finally:
        group.close()
    assert abs(one) > 1e-2 and two == pytest.approx(one, rel=1e-3)
    for name, values in of_one.items():
        for each, other in zip(values, of_two[name], strict=True):
            assert len(each) and each == pytest.approx(other, abs=1e-4)


@FULL
@pytest.mark.parametrize("stage", [0, 3])
def test_a_learner_that_trains_nothing_has_the_log_probs_of_each_models_own_weights(
    stage: int, vision: Any, start_ranks: Any, plain: Any, groups: Any, tmp_path: Path
) -> None:
    """On two ranks, of a policy and a reference whose towers differ too: no features of images are shared."""
    moved = tmp_path / "moved"
    shutil.copytree(vision.folder.path, moved)
    weights = load_file(moved / "model.safetensors")
    torch.manual_seed(0)
    weights = {name: each + 0.05 * torch.randn_like(each) for name, each in weights.items()}
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    policy = dataclasses.replace(vision.folder, path=str(moved))
    sampler, cluster = {"temperature": 1.0}, {"name": "ray", "ranks": 2}
    config = vision.config(learner=settings(stage, 64), sampler=sampler, cluster=cluster, algorithm=DPO)
    spec = EngineSpec(config, policy, vision.media, algorithm_of(DPO), 2, with_sampler=False)
    samples = [rollout for group in groups for rollout in group.rollouts]
    group = start_ranks(dataclasses.replace(spec, trains=False, initial=vision.folder))
    try:
        with group.learning() as learner:
            found = {role: learner.network(role).score(samples) for role in ("policy", "reference")}
    finally:
        group.close()
    for role, folder in {"policy": moved, "reference": vision.folder.path}.items():
        model = plain(folder)
        for sample, values in zip(samples, found[role], strict=True):
            expected = model.logprobs(sample, vision.media, 1.0).detach().numpy()
            np.testing.assert_allclose(values, expected, atol=2e-5)
    assert abs(found["policy"][0] - found["reference"][0]).max() > 1e-2
