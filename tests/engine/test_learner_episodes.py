"""Episodes with images in observations in the real learner: its gradient is plain autograd's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.device import IMAGE_FEATURE_BYTES
from mmrl.ops.packing import Item, plan_microbatches, units_of
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import ENVIRONMENT, Rollout, RolloutGroup, ScoredGroup
from mmrl_algorithms.grpo import GRPO
from tests.engine.test_learner import EXPOSED, STILL, count_images, first_moment, norm, row_losses, rows_of, weighted

FULL = pytest.mark.full
ONE_ROW, SPLITS = 4096, 66
"""Budgets: one micro-batch, and several, which split the episodes of a prompt; one episode alone exceeds it."""


@pytest.fixture(scope="module")
def case(vision) -> SimpleNamespace:
    """Episodes of three prompts; one of those without an image is in no loss."""
    samples = vision.episodes()
    masks = [sample.mask.copy() for sample in samples]
    masks[5][:] = False
    return SimpleNamespace(
        samples=samples,
        masks=masks,
        tokens=[int(mask.sum()) for mask in masks],
        advantages=(1.0, -0.5, 2.0, 0.7, -1.5, 0.3, -0.8, 0.4),
        groups=np.array([sample.prompt.id == "text" for sample in samples], int),
    )


@pytest.fixture(scope="module")
def expected(case, vision, plain) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Each episode's log-probs, and the gradient of the mean over the policy's tokens, in plain transformers."""
    values, gradients = row_losses(case, vision, plain(vision.folder.path))
    return values, weighted(gradients, [bool(count) / sum(case.tokens) for count in case.tokens])


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    own = {name: expected[name] for name in found}
    return norm({name: found[name] - own[name] for name in found}) / norm(own)


def test_a_small_budget_splits_the_episodes_of_a_prompt(case):
    units = units_of([Item.of(sample) for sample in case.samples], SPLITS)
    parts = plan_microbatches(units, SPLITS, lambda unit: unit.tokens)
    prompts = [case.samples[unit.indices[0]].prompt.id for unit in units]
    assert len(parts) > 3 and prompts.count("one") > 1 and any(len(unit.indices) > 1 for unit in units)
    assert any(unit.tokens > SPLITS for unit in units)
    pictured = [any(case.samples[i].all_images for unit in part for i in unit.indices) for part in parts]
    assert True in pictured and False in pictured


@pytest.mark.parametrize(
    ("stage", "budget", "model"),
    [
        (0, ONE_ROW, {"gradient_checkpointing": False}),
        (0, SPLITS, {"gradient_checkpointing": True}),
        (3, SPLITS, {"gradient_checkpointing": False}),
        pytest.param(3, ONE_ROW, {"gradient_checkpointing": True}, marks=FULL),
        pytest.param(0, SPLITS, {"freeze": ["vision"]}, marks=FULL),
        pytest.param(3, SPLITS, {"freeze": ["language"]}, marks=FULL),
    ],
    ids=str,
)
def test_a_steps_gradient_is_plain_autograds(stage, budget, model, start, case, expected):
    settings = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    with start(learner={**settings, "tokens_per_microbatch": budget}, model=model).learning() as learner:
        passes = count_images(learner.policy)
        result = learner.network("policy").update(rows_of(case)())
        found = first_moment(learner)
    assert error(found, expected[1]) < 1e-5
    assert result.metrics["policy/grad_norm"] == pytest.approx(norm(found), rel=1e-5)
    kept = [values for values, mask in zip(expected[0], case.masks, strict=True) if mask.any()]
    np.testing.assert_allclose(np.concatenate(result.logprobs), np.concatenate(kept), atol=1e-5)
    hashes = {ref.hash for sample in case.samples for ref in sample.all_images}
    if budget == ONE_ROW:
        assert {*passes} == {len(hashes)}
    for row, values in zip(rows_of(case)(), result.entropies, strict=True):
        assert not values[~row.sample.mask].any() and values[row.sample.mask].all()


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=FULL)])
def test_a_frozen_tower_sees_each_image_of_an_observation_once_a_step(stage, start, case, expected, monkeypatch):
    settings = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    settings["tokens_per_microbatch"] = SPLITS
    model = {"freeze": ["vision", "projector"]}
    hashes = {ref.hash for sample in case.samples for ref in sample.all_images}
    engine = start(learner=settings, model=model, algorithm={"kl": {"coef": 0.1}})
    for room, most in ((IMAGE_FEATURE_BYTES["cpu"], len(hashes) + 1), (0, None)):
        monkeypatch.setitem(IMAGE_FEATURE_BYTES, "cpu", room)
        with engine.learning() as learner:
            passes = count_images(learner.policy)
            before, reference = (
                learner.network("policy").score(case.samples),
                learner.network("reference").score(case.samples),
            )
            known = {id(sample): values for sample, values in zip(case.samples, reference, strict=True)}
            rows = [
                replace(
                    row,
                    columns={**row.columns, "reference_logprobs": known[id(row.sample)]},
                    constants={"kl_coef": 0.0},
                )
                for row in rows_of(case)()
            ]
            learner.network("policy").update(rows)
            found = first_moment(learner)
        assert not any(".visual." in name for name in found) and error(found, expected[1]) < 1e-5
        for values in (before, reference):
            np.testing.assert_allclose(np.concatenate(values), np.concatenate(expected[0]), atol=1e-5)
        assert sum(passes) == most if most is not None else sum(passes) > len(hashes) + 1


def test_a_step_with_an_episode_that_has_no_tokens_is_that_of_the_others(start, vision):
    """Its environment failed in ``reset``. The step needs log-probs from before it, and those of a reference."""
    algorithm = {"kl": {"coef": 0.1}}
    config = vision.config(learner={"zero_stage": 0, "epochs": 2}, trainer={"steps": 4, "prompts_per_step": 1})
    prompt, *others = vision.episodes()[0].prompt, *vision.episodes()[:3]
    failed = Rollout(prompt, (), 3, "", "failed", 0, failure="raised")
    found = {}
    for name, rollouts in {"with": [failed, *others], "without": others}.items():
        rewards = np.arange(len(rollouts), dtype=float)
        valid = np.array([not rollout.failure for rollout in rollouts])
        group = ScoredGroup(RolloutGroup(prompt, tuple(rollouts)), rewards * valid, valid, {ENVIRONMENT: rewards})
        grpo = GRPO(GRPO.Config.model_validate(algorithm))
        engine = start(algorithm=algorithm, learner={"zero_stage": 0, "lr": 1e-3})
        with engine.learning() as learner:
            result = finished(learn([group], grpo, learner, LearnSettings.of(config, frozenset(), 1)))
        (credited,) = result.groups
        found[name] = credited.logprobs, credited.reference_logprobs, result.metrics
    (with_it, references, metrics), (without, plain_references, plain_metrics) = found.values()
    assert len(with_it[0]) == len(references[0]) == 0
    np.testing.assert_allclose(np.concatenate(with_it[1:]), np.concatenate(without), atol=1e-6)
    np.testing.assert_allclose(np.concatenate(references[1:]), np.concatenate(plain_references), atol=1e-6)
    assert metrics["policy/grad_norm"] == pytest.approx(plain_metrics["policy/grad_norm"], rel=1e-4)
    assert metrics["policy/grad_norm"] > 0
