"""Views of prompts in the real learner: its gradient is that of two plain passes, however it is partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config.plugin_specs import PluginSpec
from mmrl.engine.spec import EngineSpec
from mmrl.interfaces import Aggregation
from mmrl.ops.image_views import masked_patches
from mmrl.ops.objective import training_rows
from mmrl.plugin_host import registry
from mmrl.types import Sample, TrainingRow
from tests.engine.test_learner import ADVANTAGES, EXPOSED, GROUPS, LENGTHS, STILL, count_images, first_moment, gradients
from tests.engine.test_learner import norm as size_of

FULL = pytest.mark.full
PAPO = {
    "name": "import:mmrl_algorithms.papo:PAPO",
    "perception_coef": 0.5,
    "entropy_own_coef": 0.3,
    "entropy_masked_coef": 0.2,
}
NOISY = {"name": "import:mmrl_algorithms.noisy_rollout:NoisyRollout", "correction": {"mode": "token-truncate"}}
BUDGETS = {4096: 1, 200: 2, 100: 4}
"""Tokens of a micro-batch, and the micro-batches of papo's rows; a row and its view are in one."""
LOW, HIGH = 0.8, 1.2


@pytest.fixture(scope="module")
def case(vision) -> SimpleNamespace:
    """Rows of three prompts, of which one has no image; the images of the others have a view. Some are in no loss."""
    rng = np.random.default_rng(0)

    def seen(prompt: Any) -> Any:
        if not prompt.images:
            return prompt
        view = vision.encoder.viewed(
            prompt, lambda place, image: masked_patches(image, np.random.default_rng(place), ratio=0.6, patch=14)
        )
        return replace(prompt, views={"masked": view, "noised": view})

    prompts = {prompt.id: seen(prompt) for prompt in vision.prompts}
    samples = [replace(sample, prompt=prompts[sample.prompt.id]) for sample in vision.samples(LENGTHS)]
    masks = [rng.random(length) < 0.8 for length in LENGTHS]
    masks[3][:] = False
    old = [rng.normal(-6, 0.3, length).astype(np.float32) for length in LENGTHS]
    return SimpleNamespace(samples=samples, masks=masks, old=old, rng=rng)


def rows_of(case: Any, samples: list[Any], old: list[Any], **views: bool) -> list[TrainingRow]:
    advantages = [np.full(length, value) for length, value in zip(LENGTHS, ADVANTAGES, strict=True)]
    columns = {"advantages": advantages, "old_logprobs": old}
    aggregation = Aggregation("seq-mean-token-mean")
    rows = training_rows(
        samples, case.masks, columns, GROUPS, aggregation, range(len(samples)), constants={"kl_coef": 0.0}, views=views
    )
    return list(rows.values())


def surrogate(logprobs: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(LOW, HIGH))


@pytest.fixture(scope="module")
def own(case, vision, plain) -> SimpleNamespace:
    """Log-probs of two plain passes for each row, and old ones near them."""
    reference = plain(vision.folder.path)
    with torch.no_grad():
        now = [reference.logprobs(sample, vision.media).numpy() for sample in case.samples]
    old = [values + case.rng.normal(0, 0.2, len(values)).astype(np.float32) for values in now]
    return SimpleNamespace(reference=reference, now=now, old=old)


def plain_gradient(own: Any, losses: Iterator[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of a sum of losses, each of passes of its own."""
    own.reference.model.zero_grad()
    for loss in losses:
        loss.backward()
    named = own.reference.model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def weights(case: Any) -> list[float]:
    """Each row's weight in seq-mean-token-mean; row 3 has no token in the loss."""
    return [1 / (6 * int(mask.sum())) if mask.any() else 0.0 for mask in case.masks]


@pytest.fixture(scope="module")
def papo(case, own, vision) -> tuple[list[TrainingRow], dict[str, torch.Tensor], list[Any]]:
    """The rows, the gradient of the formula by hand, and the log-probs given the views."""
    seen_logprobs = []

    def losses() -> Iterator[torch.Tensor]:
        rows = zip(case.samples, case.masks, own.old, ADVANTAGES, weights(case), strict=True)
        for sample, mask, old, advantage, weight in rows:
            logprobs = own.reference.logprobs(sample, vision.media)
            loss = surrogate(logprobs, torch.from_numpy(old), advantage) - 0.3 * logprobs
            seen_logprobs.append(None)
            if sample.prompt.views:
                seen = own.reference.logprobs(sample.seen("masked"), vision.media)
                seen_logprobs[-1] = seen.detach().numpy()
                loss = loss - 0.5 * ((seen - logprobs).exp() - 1 - (seen - logprobs)) - 0.2 * seen
            yield weight * loss[torch.from_numpy(mask)].sum()

    gradient = plain_gradient(own, losses())
    return rows_of(case, case.samples, own.old, masked=True), gradient, seen_logprobs


@pytest.fixture(scope="module")
def noisy(case, own, vision) -> tuple[list[TrainingRow], dict[str, torch.Tensor]]:
    """Rows of which some were sampled from the view, with log-probs of the sampler's about it; and the gradient."""
    samples = []
    for number, sample in enumerate(case.samples):
        is_noisy = bool(sample.prompt.views) and number % 2 == 0
        told = case.rng.normal(-6, 1, LENGTHS[number]) if is_noisy else own.old[number] - 0.1
        (segment,) = sample.segments
        segment = replace(segment, sampler_logprobs=told.astype(np.float32))
        samples.append(replace(sample, segments=(segment,), view="noised" if is_noisy else ""))
    assert 0 < sum(bool(sample.view) for sample in samples) < len(samples)

    def losses() -> Iterator[torch.Tensor]:
        rows = zip(samples, case.masks, own.old, ADVANTAGES, weights(case), strict=True)
        for sample, mask, old, advantage, weight in rows:
            loss = surrogate(own.reference.logprobs(sample, vision.media), torch.from_numpy(old), advantage)
            correction = 1.0 if sample.view else float(np.exp(0.1))
            yield correction * weight * loss[torch.from_numpy(mask)].sum()

    return rows_of(case, samples, own.old), plain_gradient(own, losses())


def algorithm_of(options: dict[str, Any]) -> Any:
    return registry.create("algorithm", PluginSpec.model_validate(options))


def settings(stage: int, budget: int) -> dict[str, Any]:
    learner = {"zero_stage": stage, "max_grad_norm": 1e9, "lr": STILL, "deepspeed": EXPOSED}
    return {**learner, "tokens_per_microbatch": budget}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    own = {name: expected[name] for name in found}
    assert size_of({name: found[name] - own[name] for name in own}) < 1e-5 * size_of(own)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=FULL)])
def test_the_gradient_of_two_forms_is_that_of_two_plain_passes(stage, budget, start, case, own, papo):
    rows, expected, seen = papo
    with start(algorithm=algorithm_of(PAPO), learner=settings(stage, budget)).learning() as learner:
        passes = count_images(learner.policy)
        result = learner.network("policy").update(rows)
        found = first_moment(learner)
    assert_close(found, expected)
    assert result.metrics["perf/microbatches"] == BUDGETS[budget]
    kept = [place for place, mask in enumerate(case.masks) if mask.any()]
    for place, values in zip(kept, result.statistics, strict=True):
        np.testing.assert_allclose(values.logprobs, own.now[place], atol=1e-5)
        assert set(values.views) == ({"masked"} if case.samples[place].prompt.views else set())
        for view in values.views.values():
            np.testing.assert_allclose(view.logprobs, seen[place], atol=1e-5)
            assert np.abs(view.logprobs - values.logprobs).max() > 1e-3
    if budget == 4096:  # a view shares no image with the first form
        hashes = {ref.hash for sample in case.samples for ref in sample.all_images}
        views = {ref.hash for sample in case.samples for view in sample.prompt.views.values() for ref in view.images}
        assert not hashes & views and {*passes} == {len(hashes | views)}


def test_a_view_without_gradient_is_taken_as_given(start, case, own, vision, papo):
    rows, _, seen = papo

    def losses() -> Iterator[torch.Tensor]:
        parts = zip(case.samples, case.masks, own.old, ADVANTAGES, weights(case), seen, strict=True)
        for sample, mask, old, advantage, weight, given in parts:
            logprobs = own.reference.logprobs(sample, vision.media)
            loss = surrogate(logprobs, torch.from_numpy(old), advantage) - 0.3 * logprobs
            if given is not None:
                gap = torch.from_numpy(given) - logprobs
                loss = loss - 0.5 * (gap.exp() - 1 - gap)
            yield weight * loss[torch.from_numpy(mask)].sum()

    expected = plain_gradient(own, losses())
    rows = [replace(row, views={"masked": False}) for row in rows]
    with start(algorithm=algorithm_of(PAPO), learner=settings(0, 4096)).learning() as learner:
        learner.network("policy").update(rows)
        assert_close(first_moment(learner), expected)


@pytest.mark.parametrize("budget", [4096, pytest.param(60, marks=FULL)])
def test_what_was_sampled_from_noise_is_learned_given_the_images_themselves(budget, start, noisy):
    rows, expected = noisy
    with start(algorithm=algorithm_of(NOISY), learner=settings(0, budget)).learning() as learner:
        learner.network("policy").update(rows)
        assert_close(first_moment(learner), expected)


@FULL
@pytest.mark.parametrize(
    ("name", "stage"),
    [("papo", 3), ("noisy", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("papo", 0), ("noisy", 3)))],
)
def test_two_ranks_find_the_gradient_of_two_plain_passes(stage, name, request, vision, start_ranks):
    options = {"papo": PAPO, "noisy": NOISY}[name]
    rows, expected, *_ = request.getfixturevalue(name)
    config = vision.config(
        learner=settings(stage, 130), cluster={"name": "ray", "ranks": 2}, algorithm=options | {"kl": {"coef": 0.0}}
    )
    group = start_ranks(EngineSpec(config, vision.folder, vision.media, algorithm_of(options), 2, with_sampler=False))
    try:
        with group.learning() as learner:
            result = learner.network("policy").update(rows)
            assert_close(gradients(group), expected)
        own = [set(values.views) for values in result.statistics]
        assert own == [set(row.own_views) for row in rows]
    finally:
        group.close()


def test_forms_of_a_row_are_one_unit(case):
    from mmrl.ops.packing import Item, plan_microbatches, units_of

    items = [Item.of(each, TrainingRow(each, 1.0, each.mask, {}, views={"masked": False})) for each in case.samples]
    units = units_of(items)
    assert sorted(unit.forms for unit in units) == [1, 2, 2]
    for unit in units:
        plain = sum(LENGTHS[i] - 1 for i in unit.indices) + len(case.samples[unit.indices[0]].prompt.token_ids)
        assert unit.tokens == unit.forms * plain and unit.halves()[0].forms == unit.forms
    for budget in BUDGETS:
        parts = plan_microbatches(units_of(items, budget), budget, lambda unit: unit.tokens)
        assert all(sum(unit.tokens for unit in part) <= budget or len(part) == 1 for part in parts)
    assert isinstance(case.samples[1].seen("masked"), Sample)
